"""One choice from its first to its last token, whatever happens to the stack that computes it.

`Ledger` is the promise: it takes only the next position, and only from the stack that holds the
current term. `Generation` drives it: submit, long-poll, and on the loss of the stack resubmit
elsewhere with the emitted tokens and term + 1, where the same tokens follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from k3ray.clock import Clock, Deadline, monotonic
from k3ray.engine.request import FinishReason, Request, TokenEvent
from k3ray.errors import (
    CapacityError,
    DeadlineError,
    FencedError,
    NumericError,
    PeerLostError,
    StaleVersionError,
    SupernodeError,
    UnknownRequestError,
)
from k3ray.ids import Incarnation
from k3ray.serve.router import StackRouter

_FIRST_NAP_S, _LONGEST_NAP_S = 0.02, 0.5
_MAX_SETBACKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """Waits of one generation, in seconds.

    Args:
        poll_wait_s: How long a stack may hold a long poll.
        answer_s: How long after that its answer may be late.
        stack_s: How long to wait for a stack when there is none (a rebuild included).
    """

    poll_wait_s: float = 5.0
    answer_s: float = 10.0
    stack_s: float = 120.0


class Ledger:
    """The tokens of one choice, each position accepted exactly once.

    Args:
        emitted: Tokens already known (a continued request).
        term: The first term that may speak.
    """

    def __init__(self, emitted: Sequence[int] = (), *, term: int = 1) -> None:
        self.tokens: list[int] = list(emitted)
        self.term = term
        self.finish: TokenEvent | None = None
        self.refused = 0

    @property
    def last(self) -> int:
        """The highest accepted position, -1 if none."""
        return len(self.tokens) - 1

    def accept(self, term: int, events: Sequence[TokenEvent]) -> list[TokenEvent]:
        """Take what comes next; everything else is counted in `refused` and dropped."""
        taken: list[TokenEvent] = []
        for event in events:
            current = term == self.term and self.finish is None
            if not current or event.position != len(self.tokens):
                self.refused += 1
                continue
            if event.token is not None:
                self.tokens.append(event.token)
            if event.finish is not None:
                self.finish = event
            taken.append(event)
        return taken

    def reopen(self) -> int:
        """Forget an end that was none (the stack gave up, not the model); returns the new term."""
        self.finish = None
        self.term += 1
        return self.term


class Generation:
    """Drives one choice over the stacks.

    Args:
        request: The choice; `emitted` and `term` are where it starts.
        router: The supernode.
        affinity: See `StackRouter.choose`.
        deadline: End of the whole request.
    """

    def __init__(
        self,
        request: Request,
        router: StackRouter,
        *,
        affinity: int,
        deadline: Deadline,
        limits: GenerationLimits = GenerationLimits(),
        clock: Clock = monotonic,
    ) -> None:
        self._request = request
        self._router = router
        self._affinity = affinity
        self._deadline = deadline
        self._limits = limits
        self._clock = clock
        self._stack: Incarnation | None = None
        self._avoid: frozenset[Incarnation] = frozenset()
        self._setbacks = 0
        self.ledger = Ledger(request.emitted, term=request.term)
        self.handovers = 0

    async def start(self) -> None:
        """Place the request on a first stack.

        Raises:
            CapacityError: every stack's queue is full.
            DeadlineError: no stack became ready in time.
            K3RayError: the stack refused the request.
        """
        await self._place(patient=False)

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Accepted events in order, the last one with `finish` STOP or LENGTH.

        Raises:
            DeadlineError: the request's deadline passed, or no stack came back in time.
            NumericError: the model gave NaN or infinity.
            SupernodeError: it was handed over too often without a new token.
        """
        while True:
            self._deadline.check(remedy="ask for fewer tokens or raise request_timeout_s")
            for event in self.ledger.accept(self.ledger.term, await self._poll()):
                if event.finish not in (FinishReason.ABORTED, FinishReason.ERROR):
                    self._setbacks = 0
                    yield event
            end = self.ledger.finish
            if end is None:
                continue
            if end.finish is FinishReason.ABORTED:
                await self._hand_over()  # the stack drains, or took us for gone
            elif end.finish is FinishReason.ERROR:
                await self._continue_after_error(end)
            else:
                return

    async def cancel(self) -> None:
        """Stop it at the stack; best effort."""
        if self._stack is not None and self.ledger.finish is None:
            await self._router.cancel(self._stack, self._request.request_id)

    async def _poll(self) -> Sequence[TokenEvent]:
        """One long poll; a lost stack is replaced and gives no events."""
        assert self._stack is not None, "start() comes first"
        wait_s = min(self._limits.poll_wait_s, self._deadline.left_s())
        try:
            # Not wait_for: on Python 3.11 it swallows a cancellation that meets the answer.
            async with asyncio.timeout(wait_s + self._limits.answer_s):
                return await self._router.poll(
                    self._stack, self._request.request_id,
                    after=self.ledger.last, term=self.ledger.term, wait_s=wait_s,
                )  # fmt: skip
        except (PeerLostError, DeadlineError, TimeoutError):
            await self._lose_stack()
        except (UnknownRequestError, FencedError):
            pass  # alive, but another life or another hand on the request: take it back
        await self._hand_over()
        return ()

    async def _lose_stack(self) -> None:
        assert self._stack is not None
        lost, self._stack = self._stack, None
        self._avoid |= {lost}
        await self._router.report_lost(lost)

    async def _continue_after_error(self, end: TokenEvent) -> None:
        """What would happen again anywhere ends the request; a failed stack does not."""
        code, _, message = (end.error or "").partition(": ")
        if code == NumericError.code:
            raise NumericError(
                f"{self._stack} ended the request: {message}",
                remedy="the model gave NaN or infinity here; try another version or prompt",
                peer=str(self._stack),
            )
        if self._stack is not None:
            self._avoid |= {self._stack}
        await self._hand_over()

    async def _hand_over(self) -> None:
        """Go on under the next term, on whatever stack there is."""
        self.handovers += 1
        self._setbacks += 1
        if self._setbacks > _MAX_SETBACKS:
            raise SupernodeError(
                f"the request was handed over {self._setbacks} times without a new token",
                remedy="see `k3ray status`, then retry",
            )
        self.ledger.reopen()
        await self._place(patient=True)

    async def _place(self, *, patient: bool) -> None:
        """Submit to a stack, waiting for one at most `stack_s`.

        Args:
            patient: Wait for room too; a first submission is refused at once instead.
        """
        wait = Deadline.after(
            min(self._limits.stack_s, self._deadline.left_s()),
            operation="find a ready attention stack", peer="the supernode", clock=self._clock,
        )  # fmt: skip
        forgive_s = self._clock() + self._limits.answer_s
        nap_s = _FIRST_NAP_S
        while True:
            stack = await self._router.choose(affinity=self._affinity, avoid=self._avoid)
            if stack is not None and await self._submit(stack, patient=patient):
                return
            wait.check(remedy="see `k3ray status`")
            if self._clock() >= forgive_s:
                self._avoid = frozenset()  # a stack that was only stuck may be back
            await asyncio.sleep(nap_s)
            nap_s = min(_LONGEST_NAP_S, nap_s * 2)

    async def _submit(self, stack: Incarnation, *, patient: bool) -> bool:
        """Whether `stack` took the request."""
        request = replace(self._request, emitted=tuple(self.ledger.tokens), term=self.ledger.term)
        self._stack = stack
        try:
            async with asyncio.timeout(self._limits.answer_s):
                await self._router.submit(stack, request)
        except (PeerLostError, DeadlineError, TimeoutError):
            await self._lose_stack()
        except FencedError:
            pass  # the next term is higher
        except (CapacityError, StaleVersionError):
            if not patient:
                raise  # nothing was promised yet: the client hears it at once
        else:
            return True
        self.ledger.reopen()
        return False
