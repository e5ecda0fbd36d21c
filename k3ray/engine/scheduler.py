"""Continuous batching, as a pure decision: which tokens of which sequences run in the next step.

Order: every running sequence with one known token left (decode), then prefill chunks, oldest
first, within the step's token budget. Chunks end on multiples of 64 or at the last known token.
Admission is first come, first served, when a slot and all pages the request can ever need are
free, so a running sequence never lacks room. Entry point: `Scheduler.schedule`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from k3ray.config.supernode import EngineConfig
from k3ray.engine.blocks import PAGE_TOKENS, StatePool
from k3ray.engine.sequence import Sequence
from k3ray.errors import CapacityError, ContextLengthError


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, start + length) of a sequence; `samples` if they reach its known end."""

    sequence: Sequence
    start: int
    length: int
    samples: bool


def chunk_length(*, computed: int, known: int, limit: int) -> int:
    """Length of the next prefill chunk, at most `limit`; 0 if no aligned chunk fits.

    >>> chunk_length(computed=0, known=200, limit=150)
    128
    >>> chunk_length(computed=128, known=200, limit=150)
    72
    """
    left = known - computed
    if left <= limit:
        return left
    end = (computed + limit) // PAGE_TOKENS * PAGE_TOKENS
    return max(0, end - computed)


class Scheduler:
    """Waiting and running sequences of one stack.

    Args:
        config: Bounds. Its `step_token_budget` leaves 64 tokens beside `max_running` decodes, so
            that the oldest prefill always moves.
        pool: Slots and pages.
        max_context: Longest prompt + generation the model allows, in tokens.
    """

    def __init__(self, config: EngineConfig, pool: StatePool, *, max_context: int) -> None:
        self._config = config
        self._pool = pool
        self._max_context = max_context
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def check(self, sequence: Sequence, *, retry_after_s: float) -> None:
        """Refuse what cannot be taken.

        Raises:
            ContextLengthError: the request can never fit, whatever else ends.
            CapacityError: too many requests are open; `retry_after_s` is passed on.
        """
        request = sequence.request
        prompt, generated = len(request.prompt), request.sampling.max_tokens
        if prompt + generated > self._max_context:
            raise ContextLengthError(
                f"prompt ({prompt} tokens) + max_tokens ({generated}) = {prompt + generated} "
                f"exceeds the context length of {self._max_context} tokens",
                remedy="shorten the prompt or lower max_tokens",
                param="max_tokens",
                prompt_tokens=prompt,
                max_tokens=generated,
                limit=self._max_context,
            )
        if sequence.num_pages > self._pool.num_pages:
            raise ContextLengthError(
                f"prompt ({prompt} tokens) + max_tokens ({generated}) need {sequence.num_pages} "
                f"pages of {PAGE_TOKENS} tokens, the stack has {self._pool.num_pages}",
                remedy="shorten the prompt, lower max_tokens or raise engine.num_pages",
                param="max_tokens",
                prompt_tokens=prompt,
                max_tokens=generated,
                limit=self._pool.num_pages * PAGE_TOKENS,
            )
        bound = self._config.max_running + self._config.max_waiting
        if len(self.running) + len(self.waiting) >= bound:
            raise CapacityError(
                f"{len(self.running)} requests run and {len(self.waiting)} wait, "
                f"the stack takes {bound}",
                remedy=f"retry in {retry_after_s:.0f} s or raise engine.max_waiting",
                retry_after_s=retry_after_s,
            )

    def enqueue(self, sequence: Sequence) -> None:
        """Add a checked sequence to the end of the queue."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Span]:
        """Admit what fits and return the spans of the next step; empty if nothing runs."""
        self._admit()
        budget = self._config.step_token_budget
        spans = []
        prefills = []
        for sequence in self.running:
            if sequence.left == 1:
                spans.append(Span(sequence, sequence.computed, 1, True))
            else:
                prefills.append(sequence)
        budget -= len(spans)
        for sequence in prefills:
            known = len(sequence.tokens)
            length = chunk_length(
                computed=sequence.computed,
                known=known,
                limit=min(budget, self._config.prefill_chunk_tokens),
            )
            if length == 0:
                break
            spans.append(
                Span(sequence, sequence.computed, length, sequence.computed + length == known)
            )
            budget -= length
        return spans

    def remove(self, sequence: Sequence, *, quarantine: bool = False) -> None:
        """Take a finished or cancelled sequence out and give its state back."""
        if sequence.holding is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if quarantine:
            self._pool.quarantine(sequence.holding)
        else:
            self._pool.release(sequence.holding)
        sequence.holding = None

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._config.max_running:
            head = self.waiting[0]
            if not self._pool.fits(head.num_pages):
                self._pool.scrub()
                if not self._pool.fits(head.num_pages):
                    return
            head.holding = self._pool.allocate(head.num_pages)
            self.running.append(self.waiting.popleft())
