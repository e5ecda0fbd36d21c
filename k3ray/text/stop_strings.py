"""Stop strings over streamed text: `StopMatcher` holds back what may be the start of one.

The result depends on the whole text only, not on how it is cut into deltas: text ends before the
stop string that is complete first (of those ending at the same character, the longest).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string appears.

    Args:
        stops: Stop strings; empty ones are ignored.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self.matched: str | None = None

    def feed(self, delta: str) -> str:
        """The text that may be sent now; nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + delta
        match = self._first(text)
        if match is not None:
            end, self.matched = match
            self._held = ""
            return text[: end - len(self.matched)]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and turned out to be plain text."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        found = [
            (start + len(stop), -len(stop), stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
