"""A whole training line in one process: model, experts here or on groups, ledger in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from k3ray.actors.group_handler import GroupHandler
from k3ray.config.jobs import OptimizerConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.config.presets import PRESETS
from k3ray.ids import Incarnation
from k3ray.model.expert_stack import ExpertStack
from k3ray.model.group_links import GroupLinks
from k3ray.model.k3 import K3Model
from k3ray.placement.layout import GroupShare
from k3ray.placement.plan import PlacementPlan, replace_peer
from k3ray.train.data_order import DataOrder
from k3ray.train.dense_optimizer import DenseOptimizer
from k3ray.train.expert_side import ExpertSide, LocalExperts
from k3ray.train.loop import LoopConfig, TrainLoop
from k3ray.train.remote_experts import RemoteExperts, TrainLimits
from k3ray.train.step import StepParts
from k3ray.weights.store import WeightStore
from tests.support.direct_client import DirectClient, PlanBox, peer_of
from tests.support.memory_authority import MemoryAuthority
from tests.support.shares import homes_of, only_share
from tests.support.toy_text import ToyText

CFG = PRESETS["k3-tiny"].text_config

Partition = Sequence[Sequence[int]]


class ToyGroups:
    """Expert groups in this process; `kill` one and the next wait for a plan rebuilds it."""

    def __init__(self, partition: Partition, store: WeightStore) -> None:
        self._parts = {f"group-{i}": tuple(part) for i, part in enumerate(partition)}
        self._store = store
        self.client = DirectClient()
        self.handlers: dict[str, GroupHandler] = {}
        peers = {group: peer_of(group, 1) for group in self._parts}
        homes = homes_of(list(self._parts.values()), list(self._parts), CFG)
        self.plans = PlanBox(PlacementPlan(version=1, homes=homes, peers=peers))
        self.plans.on_wait = self.rebuild
        for group in self._parts:
            self._start(group, peers[group].incarnation)

    def kill(self, group: str) -> None:
        """SIGKILL, as far as one process can play it."""
        self.client.kill(self.plans.plan.peers[group].incarnation)

    def rebuild(self) -> None:
        """Bring dead groups back, empty, under a new plan."""
        for group, peer in self.plans.plan.peers.items():
            if peer.incarnation not in self.client.handlers:
                life = peer_of(group, peer.incarnation.term + 1)
                self._start(group, life.incarnation)
                self.plans.plan = replace_peer(self.plans.plan, life)

    def rescale(self, partition: Partition) -> None:
        """Go to another number of groups as the controller does: prepare, switch, retire."""
        before = self.plans.plan
        number = before.layout + 1
        parts = {f"group-{i}": tuple(part) for i, part in enumerate(partition)}
        both = {
            group: {
                before.layout: _share(self._parts.get(group, ())),
                number: _share(parts.get(group, ())),
            }
            for group in {**self._parts, **parts}
        }
        peers = {group: before.peers.get(group, peer_of(group, 1)) for group in parts}
        for group in parts:
            if group not in self._parts:
                self.handlers[group] = GroupHandler(CFG, both[group], store=self._store)
                self.client.handlers[peers[group].incarnation] = self.handlers[group]
            self.handlers[group].hold_layouts(both[group], self._reshaped(group, both[group]))
        homes = homes_of(list(parts.values()), list(parts), CFG)
        self.plans.plan = PlacementPlan(
            version=before.version + 1, homes=homes, peers=peers, layout=number
        )
        for group in parts:
            last = {number: both[group][number]}
            self.handlers[group].hold_layouts(last, self._reshaped(group, last))
        for group in self._parts.keys() - parts.keys():
            self.client.kill(before.peers[group].incarnation)
        self._parts = parts

    def _reshaped(
        self, group: str, shares: dict[int, GroupShare]
    ) -> dict[str, dict[int, ExpertStack]]:
        handler = self.handlers[group]
        return {version: handler.reshaped(version, shares) for version in handler.versions()}

    def _start(self, group: str, incarnation: Incarnation) -> None:
        owned = dict.fromkeys(CFG.moe_layers, self._parts[group])
        self.handlers[group] = GroupHandler(CFG, only_share(owned), store=self._store, line="main")
        self.client.handlers[incarnation] = self.handlers[group]


def _share(part: Sequence[int]) -> GroupShare:
    held = dict.fromkeys(CFG.moe_layers, tuple(part)) if part else {}
    return GroupShare(owned=held, held=held)


@dataclass(slots=True, kw_only=True)
class Journal:
    """An `Observer` that remembers."""

    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    losses: dict[int, float | None] = field(default_factory=dict)

    def on_step(self, progress: object) -> None:
        """Keep the loss by step."""
        record = progress.record  # type: ignore[attr-defined]
        self.losses[record.step] = record.loss

    def on_event(self, event: str, fields: object) -> None:
        """Keep the event."""
        self.events.append((event, dict(fields)))  # type: ignore[call-overload]

    def names(self) -> list[str]:
        """Events in order, repeated ones once."""
        return [name for name, _ in itertools.groupby(e for e, _ in self.events)]


@dataclass(slots=True, kw_only=True)
class ToyLine:
    """The parts of a line; `run()` trains it."""

    store: WeightStore
    authority: MemoryAuthority
    groups: ToyGroups | None
    parts: StepParts
    loop: TrainLoop
    journal: Journal


def toy_line(
    root: Path,
    *,
    partition: Partition | None = None,
    steps: int = 5,
    resume: bool = True,
    micro_batches: int = 2,
    numbers: ExpertFormat = ExpertFormat.FP32,
    **config: int,
) -> ToyLine:
    """Build a k3-tiny line; `partition` None trains in one process."""
    torch.set_num_threads(1)  # the thread count is part of the numeric mode
    store = WeightStore(root)
    groups = ToyGroups(partition, store) if partition is not None else None
    experts: ExpertSide
    if groups is None:
        experts = LocalExperts(CFG, store=store, line="main", experts=numbers)
    else:
        experts = RemoteExperts(
            GroupLinks(groups.client), groups.plans, line="main", experts=numbers,
            limits=TrainLimits(rebuild_s=5.0),
        )  # fmt: skip
    model = K3Model(CFG)
    parts = StepParts(
        model=model,
        dense=DenseOptimizer(model),
        experts=experts,
        data=DataOrder(
            source=ToyText(num_sequences=40, borders=(0, 23, 64)), seed=0,
            micro_batches=micro_batches, sequences=2,
        ),
        optimizer=OptimizerConfig(peak_lr=3e-3, min_lr=3e-4, warmup_steps=5),
        total_steps=steps,
    )  # fmt: skip
    journal, authority = Journal(), MemoryAuthority(store)
    settings = {"checkpoint_every": 3, "publish_every": 0, "max_attempts_per_step": 3, **config}
    loop = TrainLoop(
        parts,
        LoopConfig(line="main", seed=0, resume=resume, **settings),
        authority=authority,
        store=store,
        observers=(journal,),
    )
    return ToyLine(
        store=store, authority=authority, groups=groups, parts=parts, loop=loop, journal=journal
    )
