"""What watches a training loop: `Observer`; files, tracker and the console's progress line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from k3ray.obs.tracking import Tracker
from k3ray.train.authority import Json, StepRecord

Fields = Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State after a committed step: speed over the last steps, seconds left at that speed."""

    record: StepRecord
    total_steps: int
    tokens_per_s: float
    eta_s: float

    def metrics(self) -> dict[str, Json]:
        """Flat numbers, for files and trackers."""
        record = self.record
        return {
            "step": record.step, "attempt": record.attempt, "loss": record.loss,
            "grad_norm": record.grad_norm, "lr": record.lr, "skipped": record.skipped,
            "tokens": record.num_tokens, "tokens_per_s": round(self.tokens_per_s, 1),
            "eta_s": round(self.eta_s, 1), "total_steps": self.total_steps, "plan": record.plan,
        }  # fmt: skip


class Observer(Protocol):
    """Told of what happens; must not raise for reasons of its own."""

    def on_step(self, progress: Progress) -> None:
        """A step was committed."""
        ...

    def on_event(self, event: str, fields: Fields) -> None:
        """ "resumed", "aborted", "rolled_back", "checkpoint", "published", "eval", "ended"."""
        ...


class EventFile:
    """Appends one JSON object per event (aborts, checkpoints, versions, ...).

    Args:
        path: Created with its folder; an existing file is continued.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def on_step(self, progress: Progress) -> None:
        """Steps are in the tracker's own file."""

    def on_event(self, event: str, fields: Fields) -> None:
        """See `Observer`."""
        entry = {"time_ms": int(time.time() * 1000), "event": event, **fields}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TrackerObserver:
    """Hands every step's numbers, and those of evaluations, to `obs.tracking`."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def on_step(self, progress: Progress) -> None:
        """See `Observer`."""
        metrics = _numbers(progress.metrics())
        step = int(metrics.pop("step"))
        self._tracker.log(step, metrics)

    def on_event(self, event: str, fields: Fields) -> None:
        """See `Observer`; only evaluations have numbers worth a curve."""
        if event == "eval":
            numbers = _numbers(fields)
            step = int(numbers.pop("step"))
            self._tracker.log(step, {f"eval_{name}": value for name, value in numbers.items()})


class ConsoleProgress:
    """A line at least every `every_s` seconds, from a thread of its own while nothing happens.

    Args:
        say: Prints a line.
        every_s: Longest silence.
    """

    def __init__(self, say: Callable[[str], None], *, every_s: float = 4.0) -> None:
        self._say = say
        self._every_s = every_s
        self._text = "starting"
        self._said_s = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def on_step(self, progress: Progress) -> None:
        """See `Observer`."""
        text = step_text(progress.metrics())
        with self._lock:
            self._text = text
            if time.monotonic() - self._said_s >= self._every_s / 2 or progress.record.step == 1:
                self._print(text)

    def on_event(self, event: str, fields: Fields) -> None:
        """See `Observer`."""
        facts = " ".join(f"{name}={_short(value)}" for name, value in fields.items())
        with self._lock:
            self._text = f"after {event}"
            self._print(f"{event} {facts}")

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(self._every_s)

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s / 4):
            with self._lock:
                if time.monotonic() - self._said_s >= self._every_s:
                    self._print(f"{self._text} (working)")

    def _print(self, text: str) -> None:
        self._said_s = time.monotonic()
        self._say(text)


def step_text(metrics: Fields) -> str:
    """A step as a line: "step 12/200 loss 5.1234 1830 tokens/s eta 92 s"."""
    loss = metrics.get("loss")
    shown = f"{loss:.4f}" if isinstance(loss, float) else "not finite"
    return (
        f"step {metrics.get('step')}/{metrics.get('total_steps')} loss {shown} "
        f"{float(metrics.get('tokens_per_s') or 0.0):.0f} tokens/s "
        f"eta {float(metrics.get('eta_s') or 0.0):.0f} s"
    )


def _numbers(fields: Fields) -> dict[str, float]:
    return {name: float(v) for name, v in fields.items() if isinstance(v, bool | int | float)}


def _short(value: Json) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
