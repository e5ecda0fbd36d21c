"""A line on the console at least every few seconds, however long a step takes: `Progress`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from k3ray.clock import Clock, monotonic

Say = Callable[[str], None]


@dataclass(slots=True)
class Stage:
    """A step under way; whoever does the work raises `done`."""

    name: str
    total: int | None = None
    unit: str = ""
    done: int = 0

    def line(self, seconds: float) -> str:
        """The line that is printed."""
        counted = f" {self.done}/{self.total} {self.unit}" if self.total is not None else ""
        return f"{self.name}:{counted} {seconds:.0f} s"


class Progress:
    """Times stages and says what goes on.

    Args:
        say: Prints a line.
        period_s: Longest silence within a stage.
    """

    def __init__(self, say: Say, *, period_s: float = 3.0, clock: Clock = monotonic) -> None:
        self._say = say
        self._period_s = period_s
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "") -> Iterator[Stage]:
        """Report a stage until the block ends."""
        stage, over, started = Stage(name, total, unit), threading.Event(), self._clock()

        def repeat() -> None:
            while not over.wait(self._period_s):
                self._say(stage.line(self._clock() - started))

        self._say(f"{name} ...")
        speaker = threading.Thread(target=repeat, name=f"progress-{name}", daemon=True)
        speaker.start()
        try:
            yield stage
        finally:
            over.set()
            speaker.join()
            self.seconds[name] = self._clock() - started
        self._say(stage.line(self.seconds[name]) + ", done")
