"""`Service`: everything between a checked call and its pieces; one per ingress process.

Admits (bounded), renders and tokenises, attaches repeats, starts runs, and keeps the table swept.
No HTTP and no Ray here: routes give it bytes, the router gives it stacks.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from k3ray.clock import Clock, monotonic
from k3ray.engine.request import Request
from k3ray.errors import BadRequestError, CapacityError
from k3ray.serve.api import MODEL_ALIAS, Call, CallKind
from k3ray.serve.api_responses import Envelope
from k3ray.serve.counters import Counters
from k3ray.serve.generation import GenerationLimits
from k3ray.serve.pieces import EventId
from k3ray.serve.prompts import Prompt, PromptBounds, render_prompts
from k3ray.serve.router import StackRouter
from k3ray.serve.run import Choice, Run, RunLimits
from k3ray.serve.run_table import Entry, RunKey, RunTable
from k3ray.serve.text_stream import TextStream
from k3ray.text.tokenizer import K3Tokenizer

_AFFINITY_TOKENS = 64
_SWEEP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What an ingress serves, and its bounds.

    Args:
        model: The supernode's name; the alias `kimi-k3` is always served too.
        max_open_choices: Choices being generated at once; more are answered 429.
        keep_alive_s: A comment is sent to a stream after so long without an event.
        resume_grace_s: How long a run that nobody reads keeps its weight version.
    """

    model: str
    bounds: PromptBounds
    max_open_choices: int = 256
    request_timeout_s: float = 600.0
    send_stall_timeout_s: float = 60.0
    keep_alive_s: float = 10.0
    retention_s: float = 120.0
    resume_grace_s: float = 10.0
    max_kept_runs: int = 256
    generation: GenerationLimits = field(default_factory=GenerationLimits)

    @property
    def models(self) -> tuple[str, ...]:
        """Every name this endpoint answers to."""
        return tuple(dict.fromkeys((self.model, MODEL_ALIAS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A run that this client reads, from where on. Give it back with `Service.leave`.

    Args:
        counts: Pieces per choice that the client already has.
        usage_sent: Whether it has the usage event too.
    """

    entry: Entry
    envelope: Envelope
    counts: tuple[int, ...]
    usage_sent: bool = False

    @property
    def run(self) -> Run:
        """The run behind it."""
        return self.entry.run


class Service:
    """See the module."""

    def __init__(
        self,
        settings: ServeSettings,
        router: StackRouter,
        tokenizer: K3Tokenizer,
        *,
        clock: Clock = monotonic,
    ) -> None:
        self.settings = settings
        self.router = router
        self.tokenizer = tokenizer
        self.counters = Counters(clock=clock)
        self._clock = clock
        self._table = RunTable(
            max_entries=settings.max_kept_runs,
            retention_s=settings.retention_s,
            resume_grace_s=settings.resume_grace_s,
            stall_s=settings.send_stall_timeout_s + 2 * settings.keep_alive_s,
        )
        self.started_s = int(time.time())
        self._background: set[asyncio.Task[None]] = set()

    async def open(
        self,
        call: Call,
        key: RunKey,
        last_event: EventId | None,
        *,
        version: str | None = None,
    ) -> Answer:
        """Begin a run, or attach to the one that the key names. The caller must `leave` it.

        Args:
            version: Weight version to answer by; None: the latest, or the one it began with.

        Raises:
            BadRequestError: the prompt does not fit, or the key belongs to another request.
            CapacityError: too many open choices.
            StaleVersionError: the version asked for, or to continue with, is not live.
            K3RayError: no stack was ready in time.
        """
        if last_event is not None and last_event.body != body_mark(call.digest):
            raise wrong_event("of a request with another body")
        entry = self._table.find(key, call.digest)
        if entry is None:
            began_with = None if last_event is None else last_event.version
            entry = await self._new_entry(call, key, last_event, began_with or version)
        counts = _check_position(entry, last_event)
        try:
            await entry.run.attach()
        except BaseException:
            if not entry.run.readers and not entry.run.has_tokens:
                self._table.drop(key, entry)
            raise
        if last_event is not None and last_event.version != entry.run.version:
            self.leave_run(entry.run)
            raise wrong_event("of another weight version")
        if version is not None and version != entry.run.version:
            self.leave_run(entry.run)
            raise BadRequestError(
                f"x-k3ray-version: this answer began with {entry.run.version}",
                remedy="send the version that it began with, or none",
                param="x-k3ray-version",
            )
        self.counters.requests_total += 1
        assert entry.run.version is not None
        return Answer(
            entry=entry,
            envelope=Envelope(
                answer_id=entry.answer_id,
                created_s=entry.created_s,
                call=call,
                version=entry.run.version,
            ),
            counts=counts,
            usage_sent=last_event is not None and last_event.usage_sent,
        )

    def leave(self, answer: Answer) -> None:
        """The client is served or gone; never blocks."""
        self.leave_run(answer.run)

    def leave_run(self, run: Run) -> None:
        """Detach from a run in the background (a cancelled task must not be waited in)."""
        self.spawn(run.detach())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something to its end whatever happens to the caller."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def sweep_forever(self) -> None:
        """Keep the table bounded; runs until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._table.sweep(self._clock())

    async def close(self) -> None:
        """Stop every run."""
        await self._table.close()

    async def _new_entry(
        self, call: Call, key: RunKey, last_event: EventId | None, version: str | None
    ) -> Entry:
        prompts = await render_prompts(call, self.tokenizer, self.settings.bounds)
        raced = self._table.find(key, call.digest)
        if raced is not None:
            return raced
        num_choices = len(prompts) * call.num_choices
        open_now = self._table.open_choices()
        if open_now + num_choices > self.settings.max_open_choices:
            raise CapacityError(
                f"{open_now} choices are open, {self.settings.max_open_choices} is the most",
                remedy="retry later",
                retry_after_s=1.0,
            )
        seed = _seed(call, last_event)
        run_id = f"run-{key.short}-{secrets.token_hex(3)}"
        run = Run(
            run_id,
            choices=self._choices(call, prompts, seed),
            version=version,
            router=self.router,
            counters=self.counters,
            limits=RunLimits(
                request_timeout_s=self.settings.request_timeout_s,
                generation=self.settings.generation,
            ),
            clock=self._clock,
        )
        prefix = "chatcmpl" if call.kind is CallKind.CHAT else "cmpl"
        entry = Entry(
            run=run,
            digest=call.digest,
            seed=seed,
            answer_id=f"{prefix}-{key.short}",
            created_s=int(time.time()),
            num_prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
        )
        self._table.add(key, entry)
        return entry

    def _choices(self, call: Call, prompts: Sequence[Prompt], seed: int) -> list[Choice]:
        choices: list[Choice] = []
        for prompt in prompts:
            for noise in range(call.num_choices):
                text = TextStream(call, self.tokenizer, channel=prompt.channel)
                request = Request(
                    request_id="",
                    prompt=prompt.tokens,
                    sampling=replace(
                        call.sampling,
                        max_tokens=prompt.max_tokens,
                        stop_token_ids=prompt.stop_token_ids,
                    ),
                    seed=seed,
                    choice=noise,
                    version="",
                )
                choices.append(
                    Choice(
                        index=len(choices),
                        request=request,
                        affinity=_affinity(prompt.tokens),
                        text=text,
                        pieces=text.first(prompt.echo),
                    )
                )
        return choices


def _seed(call: Call, last_event: EventId | None) -> int:
    """The client's seed, or the one the stream began with, or a fresh one."""
    if call.seed is not None:
        return call.seed
    return secrets.randbits(64) if last_event is None else last_event.seed


def _check_position(entry: Entry, last_event: EventId | None) -> tuple[int, ...]:
    """Where the client's copy of the stream ends."""
    num_choices = len(entry.run.choices)
    if last_event is None:
        return (0,) * num_choices
    if last_event.seed != entry.seed or len(last_event.counts) != num_choices:
        raise wrong_event("of another request")
    return last_event.counts


def body_mark(digest: str) -> str:
    """What an event id holds of the request's body."""
    return digest[:8]


def wrong_event(what: str) -> BadRequestError:
    """The error of a `last-event-id` that does not belong to this request."""
    return BadRequestError(
        f"last-event-id: {what}",
        remedy="send the id of the last event of the same request, with the same body",
        param="last-event-id",
    )


def _affinity(tokens: Sequence[int]) -> int:
    text = ",".join(map(str, tokens[:_AFFINITY_TOKENS]))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
