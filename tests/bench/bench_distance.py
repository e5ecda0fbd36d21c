"""The cost of distance: a training step with the experts elsewhere, over one with them here.

`k3-nano`, experts (a) in the trainer's process, (b) in two groups as threads of this process,
(c) in two group processes over ZeroMQ. The arms take turns step by step, so that a loaded machine
hits all of them. Prints medians in seconds and the ratios (goal: (c) / (a) <= 1.3). All arms must
report the same loss, bit for bit, or the bench fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_rows import record

from k3ray.actors.group_handler import GroupHandler
from k3ray.config.jobs import OptimizerConfig
from k3ray.config.presets import PRESETS
from k3ray.config.supernode import LanesConfig
from k3ray.ids import Incarnation
from k3ray.model.group_links import FixedPlan, GroupLinks
from k3ray.model.init import init_dense
from k3ray.model.k3 import K3Model
from k3ray.placement.layout import even_partition
from k3ray.placement.plan import GroupPeer, PlacementPlan
from k3ray.train.data_order import DataOrder
from k3ray.train.dense_optimizer import DenseOptimizer
from k3ray.train.expert_side import ExpertSide, LocalExperts
from k3ray.train.remote_experts import RemoteExperts
from k3ray.train.step import StepParts, run_attempt
from k3ray.train.step_tag import StepTag
from k3ray.transport.inprocess import Hub, InProcessClient, InProcessServer
from k3ray.transport.zeromq_client import ZeroMqClient
from k3ray.transport.zeromq_server import ZeroMqServer
from k3ray.weights.store import WeightStore
from tests.support.shares import homes_of, only_share
from tests.support.toy_text import ToyText

PRESET = "k3-nano"
CFG = PRESETS[PRESET].text_config
NUM_GROUPS = 2
PARTITION = even_partition(CFG.num_experts, NUM_GROUPS)
GROUPS = [f"group-{index}" for index in range(NUM_GROUPS)]


class Arm:
    """One placement of the experts, with a model of its own."""

    def __init__(self, name: str, experts: ExpertSide) -> None:
        model = K3Model(CFG)
        init_dense(model, 0)
        self.name = name
        self.seconds: list[float] = []
        self.losses: list[float | None] = []
        self._parts = StepParts(
            model=model, dense=DenseOptimizer(model), experts=experts,
            data=DataOrder(
                source=ToyText(num_sequences=64, sequence_length=512, vocab=4000),
                seed=0, micro_batches=1, sequences=4,
            ),
            optimizer=OptimizerConfig(), total_steps=1000,
        )  # fmt: skip
        experts.load(None, step=0, seed=0)

    def step(self, step: int) -> None:
        """One step, timed."""
        started = time.perf_counter()
        record = run_attempt(
            self._parts, StepTag(line="main", step=step, attempt=step),
            num_updates=step - 1, commit=lambda record: None,
        )  # fmt: skip
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(record.loss)


def handler(group: int, root: Path) -> GroupHandler:
    """The handler of one group."""
    owned = dict.fromkeys(CFG.moe_layers, PARTITION[group])
    return GroupHandler(CFG, only_share(owned), store=WeightStore(root), line="main")


def serve_group(group: int, root: Path) -> None:
    """A group process: prints its endpoint and lives until its input is closed."""
    torch.set_num_threads(1)
    server = ZeroMqServer(
        Incarnation(actor=GROUPS[group], term=1), handler(group, root), lanes=LanesConfig(),
        socket_dir=root,
    )  # fmt: skip
    print(server.endpoint, flush=True)
    sys.stdin.read()
    server.close()


@contextmanager
def group_processes(root: Path) -> Iterator[list[str]]:
    """Endpoints of the group processes."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve-group", str(group), "--root", str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for group in range(NUM_GROUPS)
    ]  # fmt: skip
    try:
        yield [process.stdout.readline().strip() for process in processes if process.stdout]
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)


def remote(client: Any, endpoints: list[str]) -> RemoteExperts:
    """Experts at these endpoints."""
    peers = {
        group: GroupPeer(incarnation=Incarnation(actor=group, term=1), endpoint=endpoint)
        for group, endpoint in zip(GROUPS, endpoints, strict=True)
    }
    homes = homes_of(PARTITION, GROUPS, CFG)
    plan = PlacementPlan(version=1, homes=homes, peers=peers)
    return RemoteExperts(GroupLinks(client), FixedPlan(plan), line="main")


def run(root: Path, steps: int) -> dict[str, Any]:
    """Step all arms in turn."""
    hub, me = Hub(), Incarnation(actor="bench", term=1)
    servers = [
        InProcessServer(
            Incarnation(actor=GROUPS[group], term=1), handler(group, root), lanes=LanesConfig(),
            hub=hub,
        )
        for group in range(NUM_GROUPS)
    ]  # fmt: skip
    with group_processes(root) as endpoints:
        zeromq = ZeroMqClient(me)
        arms = [
            Arm("local", LocalExperts(CFG, store=WeightStore(root), line="main")),
            Arm("inprocess", remote(InProcessClient(me, hub=hub), [s.endpoint for s in servers])),
            Arm("zeromq", remote(zeromq, endpoints)),
        ]
        for step in range(1, steps + 1):
            for arm in arms:
                arm.step(step)
        zeromq.close()
    for server in servers:
        server.close()
    if not arms[0].losses == arms[1].losses == arms[2].losses:
        raise SystemExit(f"losses differ: {[arm.losses for arm in arms]}")
    medians = {arm.name: float(np.median(arm.seconds[2:])) for arm in arms}
    return {
        "preset": PRESET, "groups": NUM_GROUPS, "tokens": 4 * 512, "steps": steps,
        **{f"{name}_step_p50_s": round(value, 4) for name, value in medians.items()},
        "inprocess_ratio": round(medians["inprocess"] / medians["local"], 3),
        "zeromq_ratio": round(medians["zeromq"] / medians["local"], 3),
    }  # fmt: skip


def main() -> int:
    """Run the bench, or (internally) one group process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--serve-group", type=int)
    parser.add_argument("--root")
    options = parser.parse_args()
    if options.serve_group is not None:
        serve_group(options.serve_group, Path(options.root))
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="k3b-") as root:
        row = run(Path(root), options.steps)
    record("distance", row)
    return 0 if row["zeromq_ratio"] <= 1.3 else 1


if __name__ == "__main__":
    sys.exit(main())
