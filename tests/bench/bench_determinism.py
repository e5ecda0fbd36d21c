"""Deterministic mode: 500 random schedules by bits, and what it costs over fast mode.

First the near-tie model of the tests, served by random schedules over five placements of its
experts: every log-probability must have the trainer's bits. Then `k3-nano` in both modes on one
thread, arms taking turns: a training step, a prefill, decode steps at batch 1 and 8. Prints
medians and ratios deterministic / fast. `make bench-determinism`; about eight minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_rows import record

from k3ray.config.numeric import NumericMode
from tests.support.determinism import near_tie_model, other_bits, placed_executors
from tests.support.speed_arms import Serving, Training

PRESET = "k3-nano"
PREFILL_TOKENS = 1024
DECODE_START, DECODE_STEPS = 512, 16


class Arm:
    """One mode: a model that trains and one that serves."""

    def __init__(self, numeric: NumericMode, root: Path) -> None:
        self.numeric = numeric
        self.train = Training(PRESET, sequences=4, length=512, numeric=numeric, root=root)
        self.serving = Serving(PRESET, numeric=numeric, max_batch=8, context=PREFILL_TOKENS)


def costs(rounds: int, root: Path) -> dict[str, float]:
    """Median seconds of each kind of work per mode, and the median of the rounds' ratios."""
    arms = [Arm(numeric, root) for numeric in (NumericMode.DETERMINISTIC, NumericMode.FAST)]
    works: dict[str, Callable[[Arm], None]] = {
        "training_step": lambda arm: arm.train(),
        "prefill_1024": lambda arm: arm.serving.prefill(PREFILL_TOKENS),
        "decode_batch_1": lambda arm: arm.serving.decode(DECODE_START, DECODE_STEPS, batch=1),
        "decode_batch_8": lambda arm: arm.serving.decode(DECODE_START, DECODE_STEPS, batch=8),
    }  # fmt: skip
    row: dict[str, float] = {}
    for name, work in works.items():
        seconds: list[list[float]] = []
        for _ in range(rounds + 1):
            seconds.append([timed(work, arm) for arm in arms])
        measured = seconds[1:]  # the first round warms up
        for index, arm in enumerate(arms):
            row[f"{name}_{arm.numeric}_s"] = round(
                statistics.median(each[index] for each in measured), 4
            )
        row[f"{name}_ratio"] = round(statistics.median(a / b for a, b in measured), 3)
    return row


def timed(work: Callable[[Arm], None], arm: Arm) -> float:
    """Seconds of one turn."""
    started_s = time.perf_counter()
    work(arm)
    return time.perf_counter() - started_s


def main() -> int:
    """Schedules, then costs; 1 if a bit differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="k3ray-bits-") as root:
        wrong = other_bits(
            near_tie_model(), placed_executors(Path(root) / "groups"), range(options.schedules)
        )
        print(f"{options.schedules} schedules, sequences with other bits: {wrong}", flush=True)
        row = costs(options.rounds, Path(root))
    record("determinism", {
        "schedules": options.schedules, "other_bits": len(wrong), "rounds": options.rounds, **row,
    })  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
