"""Speed on both cores: training as a share of the matrix peak, and against transformers.

* share: tokens/s x 6 x active parameters over the fp32 peak of a 2048^3 product, both on two
  threads, taking turns (goals: 20 % at nano, 30 % at mini).
* against transformers' KimiLinear at `k3-bench28`'s sizes: training, prefill, decode at batch 1
  and 8 (goals: 20x, 6x, 8x). Ours serves on one thread, which is its fastest here.

Arms take turns for `--rounds` rounds after one to warm up; ratios are medians of the rounds'
ratios. `make bench-speed`; about twelve minutes, most of it transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from bench_rows import record

from k3ray.config.numeric import NumericMode
from tests.support.speed_arms import KimiLinear, Serving, Training, Work

PEAK_SIZE, PEAK_REPEATS = 2048, 4
CONTEXT, STEPS = 256, 8


def timed(work: Work, *, threads: int = 2) -> float:
    """Seconds of one turn."""
    torch.set_num_threads(threads)
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def in_turns(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm and round, without the first."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            found = arm()
            if turn:
                seconds[name].append(found)
    return seconds


def share_row(preset: str, sequences: int, rounds: int, root: Path) -> dict[str, object]:
    """Training of a preset against the peak."""
    a, b = torch.randn(PEAK_SIZE, PEAK_SIZE), torch.randn(PEAK_SIZE, PEAK_SIZE)
    peak_flops = PEAK_REPEATS * 2 * PEAK_SIZE**3

    def peak() -> None:
        for _ in range(PEAK_REPEATS):
            torch.mm(a, b)

    works = {
        str(mode): Training(preset, sequences=sequences, length=512, numeric=mode, root=root)
        for mode in (NumericMode.DETERMINISTIC, NumericMode.FAST)
    }
    arms = {name: (lambda work=work: timed(work)) for name, work in works.items()}
    seconds = in_turns({"peak": lambda: timed(peak), **arms}, rounds)
    row: dict[str, object] = {
        "preset": preset, "tokens_per_step": sequences * 512,
        "peak_gflops": round(peak_flops / statistics.median(seconds["peak"]) / 1e9, 1),
    }  # fmt: skip
    for name, work in works.items():
        shares = [
            (work.flops / took) / (peak_flops / at_peak)
            for took, at_peak in zip(seconds[name], seconds["peak"], strict=True)
        ]
        row[f"{name}_tokens_per_s"] = round(work.tokens / statistics.median(seconds[name]))
        row[f"{name}_share_of_peak"] = round(statistics.median(shares), 4)
    row["largest_costs"] = largest_costs(works[str(NumericMode.FAST)])
    return row


def largest_costs(work: Work) -> dict[str, float]:
    """Share of a step's time in its three largest operations."""
    torch.set_num_threads(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    costs = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    total = sum(costs.values())
    largest = sorted(costs, key=lambda name: -costs[name])[:3]
    return {name: round(costs[name] / total, 3) for name in largest}


def against_transformers(rounds: int, root: Path) -> dict[str, object]:
    """Ratios of tokens/s at `k3-bench28`'s sizes."""
    preset = "k3-bench28"
    theirs = KimiLinear(preset)
    fast = NumericMode.FAST
    training = Training(preset, sequences=2, length=CONTEXT, numeric=fast, root=root)
    serving = Serving(preset, numeric=fast, max_batch=8, context=CONTEXT + 2 * STEPS)

    def their_decode(batch: int) -> float:
        theirs.prefill(16, batch=batch)
        return timed(lambda: theirs.decode(STEPS, batch=batch))

    def our_decode(batch: int) -> float:
        return timed(lambda: serving.decode(CONTEXT, STEPS, batch=batch), threads=1)

    pairs: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "training": (
            lambda: timed(training),
            lambda: timed(lambda: theirs.train(sequences=2, length=CONTEXT)),
        ),
        "prefill": (
            lambda: timed(lambda: serving.prefill(CONTEXT)),
            lambda: timed(lambda: theirs.prefill(CONTEXT)),
        ),
        "decode_batch_1": (lambda: our_decode(1), lambda: their_decode(1)),
        "decode_batch_8": (lambda: our_decode(8), lambda: their_decode(8)),
    }  # fmt: skip
    tokens = {"training": 2 * CONTEXT, "prefill": CONTEXT, "decode_batch_1": STEPS,
              "decode_batch_8": 8 * STEPS}  # fmt: skip
    row: dict[str, object] = {"preset": preset, "their_parameters": theirs.num_parameters}
    for name, (ours, other) in pairs.items():
        seconds = in_turns({"ours": ours, "theirs": other}, rounds)
        ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
        for who in ("ours", "theirs"):
            rate = tokens[name] / statistics.median(seconds[who])
            row[f"{name}_{who}_tokens_per_s"] = round(rate, 1)
        row[f"{name}_ratio"] = round(statistics.median(ratios), 2)
        print(name, row[f"{name}_ratio"], flush=True)
    return row


def main() -> int:
    """All rows; 1 if a goal is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["nano", "mini", "transformers"])
    options = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory(prefix="k3ray-speed-") as root:
        for preset, sequences, goal in (("nano", 16, 0.20), ("mini", 4, 0.30)):
            if options.only in (None, preset):
                row = share_row(f"k3-{preset}", sequences, options.rounds, Path(root))
                record("speed", row)
                if float(str(row["fast_share_of_peak"])) < goal:
                    missed.append(f"{preset} share")
        if options.only in (None, "transformers"):
            row = against_transformers(options.rounds, Path(root))
            record("speed", row)
            goals = {"training": 20, "prefill": 6, "decode_batch_1": 8, "decode_batch_8": 8}
            missed += [n for n, goal in goals.items() if float(str(row[f"{n}_ratio"])) < goal]
    print("missed: " + (", ".join(missed) or "nothing"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
