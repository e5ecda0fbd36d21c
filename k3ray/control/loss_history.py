"""The training curve that the status shows: at most `MAX_POINTS` (step, loss) pairs per line.

When it is full every second point goes, so it always spans the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_POINTS = 256


def with_history(before: Mapping[str, Any] | None, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics` with `loss_history` continued from the line's earlier report.

    A step that is reported again (a restart) replaces what followed it.
    """
    history: Sequence[tuple[int, float]] = (before or {}).get("loss_history", ())
    step, loss = metrics.get("step"), metrics.get("loss")
    if isinstance(step, int) and isinstance(loss, int | float):
        history = [*(point for point in history if point[0] < step), (step, float(loss))]
    if len(history) > MAX_POINTS:
        history = [*history[:-1][::2], history[-1]]
    return {**metrics, "loss_history": list(history)}
