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

from k3ray.config.jobs import OptimizerConfig
from k3ray.config.numeric import NumericMode
from k3ray.config.presets import PRESETS
from k3ray.model.init import init_dense
from k3ray.model.k3 import K3Model
from k3ray.model.local_executor import LocalExecutor
from k3ray.model.serve_state import SeqSpan, ServeState
from k3ray.train.data_order import DataOrder
from k3ray.train.dense_optimizer import DenseOptimizer
from k3ray.train.expert_side import LocalExperts
from k3ray.train.step import StepParts, run_attempt
from k3ray.train.step_tag import StepTag
from k3ray.weights.store import WeightStore
from tests.support.determinism import near_tie_model, other_bits, placed_executors
from tests.support.local_stack import local_bank
from tests.support.toy_text import ToyText

CFG = PRESETS["k3-nano"].text_config
PREFILL_TOKENS, CHUNK_TOKENS = 1024, 256
DECODE_START, DECODE_STEPS, MAX_BATCH = 512, 16, 8


class Arm:
    """One mode: a model that trains and one that serves."""

    def __init__(self, numeric: NumericMode, root: Path) -> None:
        self.numeric = numeric
        self._trained = K3Model(CFG, numeric=numeric)
        init_dense(self._trained, 0)
        experts = LocalExperts(CFG, store=WeightStore(root / numeric), line="main")
        experts.load(None, step=0, seed=0)
        self._parts = StepParts(
            model=self._trained, dense=DenseOptimizer(self._trained), experts=experts,
            data=DataOrder(
                source=ToyText(num_sequences=64, sequence_length=512, vocab=4000),
                seed=0, micro_batches=1, sequences=4,
            ),
            optimizer=OptimizerConfig(), total_steps=1000,
        )  # fmt: skip
        self._step = 0
        self._served = K3Model(CFG, numeric=numeric)
        init_dense(self._served, 0)
        self._served.requires_grad_(requires_grad=False)
        self._executor = LocalExecutor(local_bank(CFG, {"v": 0}), version="v")
        num_pages = PREFILL_TOKENS // 64
        self._state = ServeState(
            CFG, num_slots=MAX_BATCH, num_pages=MAX_BATCH * num_pages, numeric=numeric
        )
        self._pages = [
            tuple(range(slot * num_pages, (slot + 1) * num_pages)) for slot in range(MAX_BATCH)
        ]
        self._tokens = torch.randint(0, CFG.vocab_size, (PREFILL_TOKENS,))

    def train(self) -> None:
        """One step of four sequences of 512 tokens."""
        self._step += 1
        run_attempt(
            self._parts, StepTag(line="main", step=self._step, attempt=self._step),
            num_updates=self._step - 1, commit=lambda record: None,
        )  # fmt: skip

    def prefill(self) -> None:
        """One prompt of 1,024 tokens in chunks of 256."""
        for start in range(0, PREFILL_TOKENS, CHUNK_TOKENS):
            self._serve([(0, start)], CHUNK_TOKENS)

    def decode(self, batch: int) -> None:
        """Sixteen tokens for each of `batch` sequences at position 512."""
        for position in range(DECODE_START, DECODE_START + DECODE_STEPS):
            self._serve([(slot, position) for slot in range(batch)], 1)

    def _serve(self, sequences: list[tuple[int, int]], length: int) -> None:
        spans = [
            SeqSpan(slot=slot, pages=self._pages[slot], start=start, length=length)
            for slot, start in sequences
        ]
        tokens = torch.cat([self._tokens[start : start + length] for _, start in sequences])
        self._served.forward_serve(tokens, spans, self._state, self._executor)


def costs(rounds: int, root: Path) -> dict[str, float]:
    """Median seconds of each kind of work per mode, and the median of the rounds' ratios."""
    arms = [Arm(numeric, root) for numeric in (NumericMode.DETERMINISTIC, NumericMode.FAST)]
    works: dict[str, Callable[[Arm], None]] = {
        "training_step": Arm.train, "prefill_1024": Arm.prefill,
        "decode_batch_1": lambda arm: arm.decode(1), "decode_batch_8": lambda arm: arm.decode(8),
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
