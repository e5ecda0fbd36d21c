"""`Run`: one HTTP request's choices, computed once and readable by any number of clients.

Every choice has a list of pieces that only grows; readers hold counts. When the last reader
leaves, the run pauses: its stacks are told to stop, its tokens stay. A reader that comes back
finds it where it stopped. Single-threaded: everything runs on the ingress's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum

from k3ray.clock import Clock, Deadline, monotonic
from k3ray.engine.request import Request
from k3ray.errors import SupernodeError
from k3ray.serve.counters import Counters
from k3ray.serve.generation import Generation, GenerationLimits
from k3ray.serve.pieces import Piece
from k3ray.serve.router import StackRouter
from k3ray.serve.text_stream import TextStream

_log = logging.getLogger(__name__)


class RunState(StrEnum):
    """Where a run is; PAUSED and FAILED ones go on when somebody attaches."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One choice: its request, its text so far, its pieces."""

    index: int
    request: Request
    affinity: int
    text: TextStream
    pieces: list[Piece]
    generation: Generation | None = None

    @property
    def finished(self) -> bool:
        """Whether the last piece is there."""
        return bool(self.pieces) and self.pieces[-1].finish is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Bounds of one run: the whole request in seconds, and those of its generations."""

    request_timeout_s: float
    generation: GenerationLimits


class Run:
    """See the module.

    Args:
        run_id: Prefix of the stack's request ids and name of the pin.
        choices: In index order; their requests get version and seed from here.
        version: Weight version to pin; None takes the line's latest at the first start.
    """

    def __init__(
        self,
        run_id: str,
        *,
        choices: Sequence[Choice],
        version: str | None,
        router: StackRouter,
        counters: Counters,
        limits: RunLimits,
        clock: Clock = monotonic,
    ) -> None:
        self.run_id = run_id
        self.choices = tuple(choices)
        self.version = version
        self.state = RunState.PAUSED
        self.error: BaseException | None = None
        self.readers = 0
        self.pinned = False
        self.changed_s = clock()
        self.read_s = clock()
        self._router = router
        self._counters = counters
        self._limits = limits
        self._clock = clock
        self._life = 0
        self._started_s = clock()
        self._changed = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()

    @property
    def has_tokens(self) -> bool:
        """Whether any choice has got a token yet."""
        return any(choice.text.tokens for choice in self.choices)

    async def attach(self) -> None:
        """Count one more reader; starts or continues the run. Pair with `detach`.

        Raises:
            CapacityError: no stack has room.
            StaleVersionError: the version is no longer live.
            K3RayError: no stack was ready in time.
        """
        self.readers += 1
        self.read_s = self._clock()
        try:
            async with self._starting:
                if self.state in (RunState.PAUSED, RunState.FAILED):
                    await self._start()
        except BaseException:
            self.readers -= 1
            raise

    async def detach(self) -> None:
        """One reader less; the last one pauses an unfinished run."""
        self.readers -= 1
        if self.readers == 0 and self.state is RunState.RUNNING:
            await self._stop(RunState.PAUSED)

    async def read(
        self, counts: Sequence[int], *, idle_s: float
    ) -> AsyncIterator[tuple[int, Piece] | None]:
        """Pieces after `counts` as they come: (choice, piece); None after `idle_s` without one.

        Raises:
            K3RayError: the run failed.
        """
        seen = list(counts)
        while True:
            self.read_s = self._clock()
            changed = self._changed
            fresh = False
            for index, choice in enumerate(self.choices):
                while seen[index] < len(choice.pieces):
                    seen[index] += 1
                    fresh = True
                    self.read_s = self._clock()
                    yield index, choice.pieces[seen[index] - 1]
            if fresh:
                continue
            if self.state is RunState.FINISHED:
                return
            if self.error is not None:
                raise self.error
            if self.state is not RunState.RUNNING:
                raise SupernodeError("the request was stopped", remedy="send it again")
            try:
                async with asyncio.timeout(idle_s):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def release(self) -> None:
        """Stop and give the pin back; it may still be continued while its version lives."""
        if self.state is RunState.RUNNING:
            await self._stop(RunState.PAUSED)
        if self.pinned:
            self.pinned = False
            await self._router.unpin(self.run_id)

    async def _start(self) -> None:
        self._life += 1
        self.error = None
        deadline = Deadline.after(
            self._limits.request_timeout_s, operation="the request", peer="the endpoint"
        )
        open_choices = [choice for choice in self.choices if not choice.finished]
        self.pinned = True  # before the call: one that is cancelled may have reached its end
        try:
            self.version = await self._router.pin(self.run_id, self.version)
            for choice in open_choices:
                choice.generation = self._generation(choice, self.version, deadline)
                await choice.generation.start()
        except BaseException:
            await self._cancel_generations()
            await self.release()
            raise
        self.state = RunState.RUNNING
        self._pumps = [
            asyncio.create_task(self._pump(choice, choice.generation))
            for choice in open_choices
            if choice.generation is not None
        ]

    def _generation(self, choice: Choice, version: str, deadline: Deadline) -> Generation:
        """A generation for what is left of a choice, under a request id of its own."""
        request = replace(
            choice.request,
            request_id=f"{self.run_id}.{choice.index}.{self._life}",
            emitted=tuple(choice.text.tokens),
            version=version,
        )
        return Generation(
            request,
            self._router,
            affinity=choice.affinity,
            deadline=deadline,
            limits=self._limits.generation,
        )

    async def _pump(self, choice: Choice, generation: Generation) -> None:
        """Move tokens into pieces until the choice has ended."""
        self._counters.opened()
        try:
            await self._follow(choice, generation)
        except Exception as error:
            _log.warning("event=run.failed run=%s error=%s", self.run_id, error)
            await self._fail(error)
            return
        finally:
            self._counters.closed(handovers=generation.handovers)
        if all(other.finished for other in self.choices) and self.state is RunState.RUNNING:
            self.state = RunState.FINISHED
            self.changed_s = self._clock()
            self._wake()
            await self.release()

    async def _follow(self, choice: Choice, generation: Generation) -> None:
        async with aclosing(generation.events()) as events:
            async for event in events:
                if event.token is not None:
                    self._counters.token()
                    if event.position == 0:
                        self._counters.first_token(self._clock() - self._started_s)
                self._add(choice, choice.text.feed(event))
                if choice.text.finished:
                    break
        await generation.cancel()

    def _add(self, choice: Choice, pieces: Sequence[Piece]) -> None:
        if pieces:
            choice.pieces.extend(pieces)
            self._wake()

    async def _fail(self, error: BaseException) -> None:
        """The first failure of a choice ends the run for its readers."""
        if self.state is RunState.RUNNING:
            self.error = error
            await self._stop(RunState.FAILED)

    async def _stop(self, state: RunState) -> None:
        self.state = state
        self.changed_s = self._clock()
        async with self._starting:  # nobody continues it until the stacks know
            current = asyncio.current_task()
            running = [pump for pump in self._pumps if pump is not current and not pump.done()]
            for pump in running:
                pump.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._wake()
            await self._cancel_generations()

    async def _cancel_generations(self) -> None:
        for choice in self.choices:
            if choice.generation is not None and not choice.finished:
                await choice.generation.cancel()

    def _wake(self) -> None:
        """Let every reader look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
