"""Time as an argument: the monotonic clock, and deadlines computed from it.

Decisions never read the clock themselves; they take a `Clock` or a `now_s` value. `Deadline`
carries the operation and peer so that whatever reaches it can name both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from k3ray.errors import DeadlineError

Clock = Callable[[], float]
"""Returns monotonic seconds."""

monotonic: Clock = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A point in monotonic time by which `operation` with `peer` must be over."""

    operation: str
    peer: str
    limit_s: float
    at_s: float
    clock: Clock = monotonic

    @staticmethod
    def after(limit_s: float, *, operation: str, peer: str, clock: Clock = monotonic) -> Deadline:
        """Start a deadline `limit_s` seconds from now."""
        return Deadline(
            operation=operation, peer=peer, limit_s=limit_s, at_s=clock() + limit_s, clock=clock
        )

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - self.clock())

    def passed(self) -> bool:
        """Whether the deadline has been reached."""
        return self.clock() >= self.at_s

    def error(self, remedy: str = "") -> DeadlineError:
        """The error that names peer, operation and limit."""
        return DeadlineError(
            f"{self.operation} with {self.peer} did not finish within {self.limit_s:g} s",
            remedy=remedy or "check that the peer is alive (k3ray status) and retry",
            peer=self.peer,
            operation=self.operation,
            deadline_s=self.limit_s,
        )

    def check(self, remedy: str = "") -> None:
        """Raise `DeadlineError` if the deadline has been reached."""
        if self.passed():
            raise self.error(remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Default deadlines in seconds, one table for the whole system (design, promise 6)."""

    hop_s: float = 1.0
    prefill_chunk_s: float = 10.0
    prepare_s: float = 30.0
    commit_s: float = 5.0
    start_s: float = 60.0
