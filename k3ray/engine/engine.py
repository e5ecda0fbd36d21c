"""`Engine`: requests in, token events out; one thread calls `step`, any thread the rest.

A step schedules under the lock, runs the model without it, and commits under it, so that submit,
cancel and read never wait for a layer. Invariants: every accepted request gets exactly one event
with `finish`; positions follow each other; slots and pages change hands only between two model
runs. A failed hop makes its sequences start over from their known tokens, once per token.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from k3ray.clock import Clock, monotonic
from k3ray.config.model import TextConfig
from k3ray.config.supernode import EngineConfig
from k3ray.engine.admission import check_request, is_repeat
from k3ray.engine.blocks import StatePool
from k3ray.engine.event_log import EventLog
from k3ray.engine.request import FinishReason, Request, TokenEvent
from k3ray.engine.runner import Logits, ModelRunner, Work
from k3ray.engine.sampling import Sampled, noise, sample
from k3ray.engine.scheduler import Scheduler, Span
from k3ray.engine.scoring import LogProbs, ScoreQueue
from k3ray.engine.sequence import Sequence, new_sequence
from k3ray.errors import CapacityError, K3RayError, NumericError, StaleVersionError, TransportError

SCORE_SLOTS = 1
"""Slots a runner needs beside `max_running`, for scoring."""

_HOUSEKEEPING_S = 1.0
_MAX_FAILURES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot: counts, and the median time of a recent step in seconds (0 before any)."""

    running: int
    waiting: int
    scoring: int
    free_slots: int
    free_pages: int
    quarantined_pages: int
    versions: tuple[str, ...]
    plan_version: int
    tokens_total: int
    requests_total: int
    steps_total: int
    recoveries_total: int
    step_p50_s: float


class Engine:
    """One stack's engine.

    Args:
        text: Model sizes (context length, vocabulary, end token).
        config: Bounds.
        runner: The model; its state has `max_running + SCORE_SLOTS` slots.
        clock: Monotonic seconds.
        on_events: Called on the stepping thread (or a canceller's) after events were added.
    """

    def __init__(
        self,
        text: TextConfig,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        clock: Clock = monotonic,
        on_events: Callable[[], None] = lambda: None,
    ) -> None:
        self._text = text
        self._runner = runner
        self._clock = clock
        self._on_events = on_events
        self._pool = StatePool(
            num_slots=config.max_running + SCORE_SLOTS,
            num_pages=config.num_pages,
            zero=runner.zero,
        )
        self._scheduler = Scheduler(config, self._pool, max_context=text.max_position_embeddings)
        self._scores = ScoreQueue(
            runner,
            self._pool,
            chunk_tokens=config.prefill_chunk_tokens,
            max_jobs=max(1, config.max_waiting),
            max_context=text.max_position_embeddings,
        )
        self._log = EventLog(
            event_budget=config.event_budget,
            finished_retention_s=config.finished_retention_s,
            orphan_timeout_s=config.orphan_timeout_s,
        )
        self._sequences: dict[str, Sequence] = {}
        self._leaving: list[Sequence] = []
        self._wake = threading.Condition()
        self._next_housekeeping_s = 0.0
        self._step_times_s: deque[float] = deque(maxlen=256)
        self._tokens_total = self._requests_total = 0
        self._steps_total = self._recoveries_total = 0

    def submit(self, request: Request) -> bool:
        """Take a request; a repeat of a known id attaches to it.

        Returns:
            True if it is new, False if it attached.

        Raises:
            BadRequestError: malformed, or the id belongs to another request.
            ContextLengthError: it can never fit.
            CapacityError: too many open requests; `retry_after_s` says when to come back.
            StaleVersionError: its weight version is not live here.
            FencedError: a higher term of it has been seen.
        """
        check_request(request, vocab_size=self._text.vocab_size)
        with self._wake:
            now_s = self._clock()
            if self._log.find(request.request_id) is not None:
                record = self._log.fence(request.request_id, request.term)
                if is_repeat(request, record, self._sequences.get(request.request_id)):
                    record.polled_s = now_s
                    return False
            if request.version not in self._runner.versions():
                raise StaleVersionError(
                    f"weight version {request.version} is not live on this stack",
                    remedy="pin a live version (k3ray status) and resubmit",
                    version=request.version,
                )
            sequence = new_sequence(request, eos_token_id=self._text.eos_token_id)
            self._scheduler.check(sequence, retry_after_s=self._retry_after_s())
            self._cancel(request.request_id, now_s)
            self._log.open(request, now_s=now_s)
            self._requests_total += 1
            end = sequence.natural_end()
            if end is not None:
                self._finish_event(sequence, end, now_s=now_s)
                return True
            self._sequences[request.request_id] = sequence
            self._scheduler.enqueue(sequence)
            self._wake.notify_all()
        return True

    def cancel(self, request_id: str) -> None:
        """End a request with ABORTED; unknown or finished ones are left alone."""
        with self._wake:
            self._cancel(request_id, self._clock())
            self._wake.notify_all()
        self._on_events()

    def read(self, request_id: str, *, after: int, term: int) -> list[TokenEvent]:
        """Events with a position above `after` (-1: all), in order; may be empty.

        Raises:
            UnknownRequestError: not known here, or those events are no longer kept.
            FencedError: a higher term has been seen.
        """
        with self._wake:
            return self._log.read(request_id, after=after, term=term, now_s=self._clock())

    def score(self, version: str, tokens: tuple[int, ...]) -> Future[LogProbs]:
        """Log-probabilities of tokens[1:] under `version`, teacher-forced; see `ScoreQueue`."""
        check_request(
            Request(request_id="score", prompt=tokens, seed=0, version=version),
            vocab_size=self._text.vocab_size,
        )
        if len(tokens) < 2:
            done: Future[LogProbs] = Future()
            done.set_result(np.zeros(0, dtype=np.float32))
            return done
        future = self._scores.submit(version, tokens)
        with self._wake:
            self._wake.notify_all()
        return future

    def check_droppable(self, version: str) -> None:
        """Check that no open request or score job needs a version.

        Raises:
            CapacityError: some do.
        """
        with self._wake:
            users = [s for s in self._sequences.values() if s.request.version == version]
            if users or self._scores.uses(version):
                raise CapacityError(
                    f"{len(users)} open requests pin weight version {version}",
                    remedy="retry when they have ended",
                    version=version,
                    retry_after_s=1.0,
                )

    def step(self) -> bool:
        """Run one step; returns False if there was nothing to do."""
        started_s = self._clock()
        with self._wake:
            self._housekeep(started_s)
            reaped = self._reap()
            spans = self._scheduler.schedule()
        if spans:
            results = self._runner.forward([_work(span) for span in spans])
            sampled = [_choose(span, result) for span, result in zip(spans, results, strict=True)]
            with self._wake:
                for span, outcome in zip(spans, sampled, strict=True):
                    self._commit(span, outcome)
                self._reap()
                self._steps_total += 1
                self._step_times_s.append(self._clock() - started_s)
            self._on_events()
        scored = self._scores.advance()
        return bool(spans) or reaped or scored

    def wait_for_work(self, timeout_s: float) -> None:
        """Sleep until there may be work, at most `timeout_s`."""
        with self._wake:
            idle = not (self._sequences or self._leaving or len(self._scores))
            if idle:
                self._wake.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait_for_work` now."""
        with self._wake:
            self._wake.notify_all()

    def fail_all(self, error: K3RayError) -> None:
        """End every open request and score job with `error`."""
        with self._wake:
            now_s = self._clock()
            for sequence in list(self._sequences.values()):
                self._finish_event(sequence, FinishReason.ERROR, now_s=now_s, error=error)
            self._reap()
        self._scores.fail_all(error)
        self._on_events()

    def stats(self) -> EngineStats:
        """A consistent snapshot."""
        with self._wake:
            times = list(self._step_times_s)
            return EngineStats(
                running=len(self._scheduler.running),
                waiting=len(self._scheduler.waiting),
                scoring=len(self._scores),
                free_slots=self._pool.free_slots,
                free_pages=self._pool.free_pages,
                quarantined_pages=self._pool.quarantined_pages,
                versions=self._runner.versions(),
                plan_version=self._runner.plan_version(),
                tokens_total=self._tokens_total,
                requests_total=self._requests_total,
                steps_total=self._steps_total,
                recoveries_total=self._recoveries_total,
                step_p50_s=statistics.median(times) if times else 0.0,
            )

    def _commit(self, span: Span, outcome: Sampled | K3RayError | None) -> None:
        sequence = span.sequence
        if sequence.finish is not None:
            return
        now_s = self._clock()
        match outcome:
            case NumericError():
                self._finish_event(sequence, FinishReason.ERROR, now_s=now_s, error=outcome)
                self._leaving.remove(sequence)
                self._scheduler.remove(sequence, quarantine=True)
            case TransportError() if sequence.failures < _MAX_FAILURES:
                self._start_over(sequence)
            case K3RayError():
                self._finish_event(sequence, FinishReason.ERROR, now_s=now_s, error=outcome)
            case None:
                sequence.computed = span.start + span.length
            case Sampled():
                sequence.computed = span.start + span.length
                self._emit(sequence, outcome, now_s)

    def _emit(self, sequence: Sequence, chosen: Sampled, now_s: float) -> None:
        request = sequence.request
        position = sequence.position
        sequence.append(chosen.token)
        self._tokens_total += 1
        end = sequence.natural_end()
        event = TokenEvent(
            position=position,
            token=chosen.token,
            logprob=chosen.logprob,
            top_logprobs=chosen.top_logprobs,
            finish=end,
            version=request.version,
            plan=self._runner.plan_version(),
        )
        kept = self._log.append(request.request_id, event, now_s=now_s)
        if end is not None:
            self._leave(sequence, end)
        elif not kept:
            self._cancel(request.request_id, now_s)

    def _start_over(self, sequence: Sequence) -> None:
        """The state may be half advanced: zero it and prefill what is known."""
        assert sequence.holding is not None
        sequence.failures += 1
        sequence.computed = 0
        self._runner.zero(sequence.holding.slot, sequence.holding.pages)
        self._recoveries_total += 1

    def _cancel(self, request_id: str, now_s: float) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish_event(sequence, FinishReason.ABORTED, now_s=now_s)

    def _finish_event(
        self,
        sequence: Sequence,
        finish: FinishReason,
        *,
        now_s: float,
        error: K3RayError | None = None,
    ) -> None:
        """End a request by an event without a token."""
        event = TokenEvent(
            position=sequence.position,
            token=None,
            finish=finish,
            version=sequence.request.version,
            plan=self._runner.plan_version(),
            error=None if error is None else f"{error.code}: {error}",
        )
        self._log.append(sequence.request.request_id, event, now_s=now_s)
        self._leave(sequence, finish)

    def _leave(self, sequence: Sequence, finish: FinishReason) -> None:
        sequence.finish = finish
        if self._sequences.pop(sequence.request.request_id, None) is not None:
            self._leaving.append(sequence)

    def _reap(self) -> bool:
        """Give back the state of ended sequences; only between two model runs."""
        reaped = bool(self._leaving)
        for sequence in self._leaving:
            self._scheduler.remove(sequence)
        self._leaving.clear()
        return reaped

    def _housekeep(self, now_s: float) -> None:
        if now_s < self._next_housekeeping_s:
            return
        self._next_housekeeping_s = now_s + _HOUSEKEEPING_S
        for request_id in self._log.expire(now_s=now_s):
            self._cancel(request_id, now_s)

    def _retry_after_s(self) -> float:
        """When the first running request ends at the latest, within [1, 60] seconds."""
        left = [s.request.sampling.max_tokens - s.position for s in self._scheduler.running] or [1]
        step_s = self._step_times_s[-1] if self._step_times_s else 0.0
        return min(60.0, max(1.0, min(left) * step_s))


def _work(span: Span) -> Work:
    sequence = span.sequence
    assert sequence.holding is not None
    return Work(
        version=sequence.request.version,
        slot=sequence.holding.slot,
        pages=sequence.holding.pages,
        start=span.start,
        tokens=sequence.tokens[span.start : span.start + span.length],
    )


def _choose(span: Span, result: Logits | K3RayError) -> Sampled | K3RayError | None:
    """What a span's result means: an error, nothing yet (inner prefill chunk), or a token."""
    if isinstance(result, K3RayError):
        return result
    request = span.sequence.request
    if not np.isfinite(result).all():
        return NumericError(
            f"logits at position {span.sequence.position} of request {request.request_id} "
            f"are not finite under {request.version}",
            remedy="check the weight version for NaN",
            request_id=request.request_id,
            version=request.version,
        )
    if not span.samples:
        return None
    uniform = noise(seed=request.seed, choice=request.choice, position=span.sequence.position)
    return sample(result, request.sampling, uniform=uniform, counts=span.sequence.counts)
