"""What the ingress counts about itself: open and waiting choices, tokens, hand-overs, refusals."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from k3ray.clock import Clock, monotonic
from k3ray.obs.metrics import MetricSet

_WINDOW_S = 5.0


@dataclass(slots=True, kw_only=True)
class Counters:
    """Plain numbers of one ingress process, since its start.

    Args:
        running: Choices being generated now.
        streams: HTTP answers being read now.
        metrics: What is more than a number: the time to the first token.
    """

    clock: Clock = monotonic
    running: int = 0
    streams: int = 0
    requests_total: int = 0
    choices_total: int = 0
    tokens_total: int = 0
    handovers_total: int = 0
    refused_total: int = 0
    failed_total: int = 0
    metrics: MetricSet = field(default_factory=MetricSet)
    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def opened(self) -> None:
        """A choice began (or goes on)."""
        self.running += 1
        self.choices_total += 1

    def closed(self, *, handovers: int) -> None:
        """A choice ended, paused or failed; `handovers` is how often it changed stacks."""
        self.running -= 1
        self.handovers_total += handovers

    def token(self) -> None:
        """A token was accepted."""
        self.tokens_total += 1
        second = float(int(self.clock()))
        if self.recent and self.recent[-1][0] == second:
            self.recent[-1] = (second, self.recent[-1][1] + 1)
        else:
            self.recent.append((second, 1))
            self._forget()

    def first_token(self, waited_s: float) -> None:
        """A choice got its first token, `waited_s` after it was accepted."""
        self.metrics.observe("k3ray_ingress_first_token_seconds", waited_s)

    def tokens_per_s(self) -> float:
        """Tokens per second over the last 5 whole seconds."""
        self._forget()
        now_s = float(int(self.clock()))
        return sum(count for second, count in self.recent if second < now_s) / _WINDOW_S

    def snapshot(self) -> dict[str, Any]:
        """JSON-able values for the status page."""
        return {
            "running": self.running,
            "streams": self.streams,
            "requests_total": self.requests_total,
            "choices_total": self.choices_total,
            "tokens_total": self.tokens_total,
            "tokens_per_s": round(self.tokens_per_s(), 2),
            "handovers_total": self.handovers_total,
            "refused_total": self.refused_total,
            "failed_total": self.failed_total,
        }

    def _forget(self) -> None:
        oldest_s = float(int(self.clock())) - _WINDOW_S
        while self.recent and self.recent[0][0] < oldest_s:
            self.recent.popleft()
