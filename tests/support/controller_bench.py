"""A controller without Ray over real processes that stand for actors, and words for waiting.

Deaths, stops and fencing are real signals to real processes; only Ray's calls are replaced.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from k3ray.actors.controller import ControllerCore
from k3ray.actors.controller_cluster import (
    Folders,
    is_alive,
    kill_process,
    own_node,
    process_started,
)
from k3ray.config.supernode import DeadlineConfig, SupernodeSpec
from k3ray.control.leases import Lease
from k3ray.control.supervisor import Holding, ProcessFacts
from k3ray.errors import PeerLostError, StoreError
from k3ray.ids import Incarnation, Role
from k3ray.placement.layout import GroupShare
from k3ray.weights.manifest import ShardInfo
from k3ray.weights.store import StagedEntry, WeightStore

SPEC = SupernodeSpec(
    preset="k3-tiny", groups=2, stacks=1, max_live_versions=1, lease_ttl_s=5.0,
    deadlines=DeadlineConfig(prepare_s=0.5, hop_s=0.3, rebuild_s=4.0),
)  # fmt: skip


class ProcessActors:
    """`ActorCluster`'s methods over `sleep` processes. A second controller may be given the first
    one's: the processes go on."""

    def __init__(self) -> None:
        self.processes: dict[Incarnation, subprocess.Popen[bytes]] = {}
        self.orders: list[tuple[str, str, tuple[Any, ...]]] = []
        self.holding: dict[Incarnation, Holding] = {}
        self.silent: set[str] = set()  # actors that do not say what they hold
        self.refuse = ""  # start of the versions that nobody can load

    async def start(
        self, incarnation: Incarnation, role: Role, shares: Mapping[int, GroupShare]
    ) -> ProcessFacts:
        alive = [i for i in self.processes if i.actor == incarnation.actor]
        assert not alive, "a new life before the old one was fenced"
        process = subprocess.Popen(["sleep", "1000"])
        self.processes[incarnation] = process
        self.holding[incarnation] = Holding(versions=frozenset(), shares=dict(shares))
        return ProcessFacts(
            node=own_node(), pid=process.pid, endpoint=f"ipc:///{incarnation}",
            process_started_unix_s=process_started(process.pid),
        )  # fmt: skip

    async def call(
        self, incarnation: Incarnation, method: str, *args: Any, limit_s: float
    ) -> dict[str, Any]:
        return {"method": method}

    async def order(self, incarnation: Incarnation, method: str, *args: Any) -> None:
        self.orders.append((str(incarnation), method, args))
        if method == "load_version" and self.refuse and args[0].startswith(self.refuse):
            raise StoreError("refused by the test")

        held = self.holding[incarnation]
        match method:
            case "load_version":
                self.holding[incarnation] = replace(held, versions=held.versions | {args[0]})
            case "drop_version":
                self.holding[incarnation] = replace(held, versions=held.versions - {args[0]})
            case "set_plan":
                self.holding[incarnation] = replace(held, plan=args[0].version)
            case "hold_layouts":
                self.holding[incarnation] = replace(held, shares=dict(args[0]))

    async def ask_held(self, incarnation: Incarnation, *, limit_s: float) -> Holding:
        if incarnation.actor in self.silent or incarnation not in self.processes:
            raise PeerLostError(f"{incarnation} does not answer", peer=str(incarnation))
        return self.holding[incarnation]

    async def until_dead(self, incarnation: Incarnation) -> None:
        await asyncio.Event().wait()

    async def fence(self, incarnation: Incarnation, facts: ProcessFacts, *, limit_s: float) -> None:
        kill_process(facts)
        self.processes.pop(incarnation).wait()
        assert not is_alive(facts)


class Bench:
    """A controller, its fake actors (those of an earlier one, if given), and short words for
    waiting."""

    def __init__(self, folder: Path, actors: ProcessActors | None = None) -> None:
        self.store = WeightStore(folder / "store")
        if self.store.latest("main") is None:
            staged = self.store.stage("main", "version", 0)
            self.store.commit(staged, [self.shard(staged, 0)])
        self.core = ControllerCore(
            SPEC,
            Folders(
                store_dir=folder / "store",
                socket_dir=folder / "s",
                journal_file=folder / "journal" / "journal.jsonl",
            ),
        )
        self.actors = actors or ProcessActors()
        self.core._cluster = self.actors  # type: ignore[assignment]

    def shard(self, staged: StagedEntry, value: int) -> ShardInfo:
        return self.store.write_shard(staged, "all", {"x": np.full(3, value, np.float32)})

    async def until(
        self, condition: Callable[[dict[str, Any]], Any], limit_s: float = 10.0
    ) -> dict[str, Any]:
        async with asyncio.timeout(limit_s):
            while not (document := await self.core.status()) or not condition(document):
                await asyncio.sleep(0.02)
        return document

    async def ready(self) -> dict[str, Any]:
        await self.core.begin()
        return await self.until(lambda d: d["state"] == "ready")

    async def publish(self, lease: Lease, step: int) -> str:
        staged = await self.core.begin_publish(lease.id, "main", step)
        return await self.core.commit_publish(lease.id, staged, [self.shard(staged, step)])


def entry(document: dict[str, Any], actor: str) -> dict[str, Any]:
    return next(a for a in document["actors"] if a["id"] == actor)
