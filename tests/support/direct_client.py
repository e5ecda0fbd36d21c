"""`DirectClient`: a transport client that runs the peers' handlers in the caller's own thread.

For tests of what is built on the transport: no threads, no time, deaths exactly where a test wants
them. Real clients are covered by the transport's own contract tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from k3ray.actors.group_handler import GroupHandler
from k3ray.clock import Deadline
from k3ray.config.model import TextConfig
from k3ray.errors import K3RayError, PeerLostError
from k3ray.ids import Incarnation
from k3ray.model.expert_math import finish
from k3ray.model.expert_stack import all_experts, init_stacks
from k3ray.placement.layout import first_layout
from k3ray.placement.plan import GroupPeer, PlacementPlan
from k3ray.transport.protocol import Handler, Lane, Message, Pending
from k3ray.weights.store import WeightStore
from tests.support.shares import only_share

Observer = Callable[[Incarnation, Message], None]


@dataclass(slots=True, kw_only=True)
class DirectPending:
    """A request that has already been answered."""

    peer: Incarnation
    reply: Message | K3RayError

    def done(self) -> bool:
        """Always."""
        return True


class DirectClient:
    """Handlers by incarnation; `observe` sees every message before it is handled."""

    def __init__(self) -> None:
        self.handlers: dict[Incarnation, Handler] = {}
        self.observe: Observer = lambda peer, message: None

    def kill(self, peer: Incarnation) -> None:
        """The peer's process is gone."""
        self.handlers.pop(peer, None)

    def connect(self, peer: Incarnation, endpoint: str, deadline: Deadline) -> None:
        """Nothing to do; a dead peer is refused."""
        self._handler(peer, "connect")

    def send(self, peer: Incarnation, message: Message, *, lane: Lane) -> Pending:
        """Handle at once."""
        self.observe(peer, message)
        try:
            reply: Message | K3RayError = finish(self._handler(peer, message.op)(message))
        except PeerLostError:
            raise
        except K3RayError as error:
            reply = error
        return DirectPending(peer=peer, reply=reply)

    def wait(self, pendings: Sequence[Pending], deadline: Deadline) -> list[Message]:
        """The replies."""
        replies = []
        for pending in pendings:
            assert isinstance(pending, DirectPending)
            self._handler(pending.peer, "wait")
            if isinstance(pending.reply, K3RayError):
                raise pending.reply
            replies.append(pending.reply)
        return replies

    def wait_any(self, pendings: Sequence[Pending], deadline: Deadline) -> bool:
        """All are done."""
        return True

    def disconnect(self, peer: Incarnation) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def _handler(self, peer: Incarnation, operation: str) -> Handler:
        handler = self.handlers.get(peer)
        if handler is None:
            raise PeerLostError(
                f"{peer} is dead", remedy="wait for a new plan", peer=str(peer), operation=operation
            )
        return handler


class PlanBox:
    """A `PlanSource` whose next plan is made by `on_wait` when somebody waits for it."""

    def __init__(self, plan: PlacementPlan) -> None:
        self.plan = plan
        self.on_wait: Callable[[], None] = lambda: None

    def current(self) -> PlacementPlan:
        """The plan."""
        return self.plan

    def wait_newer(self, than_version: int, deadline: Deadline) -> PlacementPlan:
        """Calls `on_wait`, which must have made a newer plan."""
        if self.plan.version <= than_version:
            self.on_wait()
        if self.plan.version <= than_version:
            raise deadline.error()
        return self.plan


def peer_of(group: str, term: int) -> GroupPeer:
    """A peer without a real endpoint."""
    return GroupPeer(incarnation=Incarnation(actor=group, term=term), endpoint=f"direct:{group}")


def group_handler(
    cfg: TextConfig,
    tensors: Mapping[str, torch.Tensor],
    experts: Sequence[int],
    store_dir: Path,
    *,
    version: str,
    copies: Sequence[int] = (),
) -> GroupHandler:
    """A group that owns these experts of every layer and has copies of others, one version."""
    owned, held = (
        dict.fromkeys(cfg.moe_layers, tuple(sorted(part)))
        for part in (experts, [*experts, *copies])
    )
    handler = GroupHandler(cfg, only_share(owned, held), store=WeightStore(store_dir), line="main")
    handler.load_version(version, tensors)
    return handler


def serve_partition(
    cfg: TextConfig,
    tensors: Mapping[str, torch.Tensor],
    partition: Sequence[Sequence[int]],
    store_dir: Path,
    *,
    version: str,
    replication: int = 1,
) -> tuple[DirectClient, PlacementPlan]:
    """A client of one group per part, and the plan that says so."""
    client = DirectClient()
    groups = [f"group-{index}" for index in range(len(partition))]
    peers = {group: peer_of(group, 1) for group in groups}
    layout = first_layout(partition, groups, replication, cfg.num_experts)
    homes, replicas = layout.homes(cfg), layout.replicas(cfg)
    layer = cfg.moe_layers[0]
    for group, experts in zip(groups, partition, strict=True):
        copies = [e for e in range(cfg.num_experts) if group in replicas[layer][e]]
        handler = group_handler(cfg, tensors, experts, store_dir, version=version, copies=copies)
        client.handlers[peers[group].incarnation] = handler
    return client, PlacementPlan(version=1, homes=homes, replicas=replicas, peers=peers)


def loud_experts(cfg: TextConfig) -> dict[str, torch.Tensor]:
    """All routed experts by name, ten times their usual size, so that they matter."""
    stacks = init_stacks(cfg, all_experts(cfg), seed=4)
    return {n: t * 10 for layer, s in stacks.items() for n, t in s.named(layer).items()}
