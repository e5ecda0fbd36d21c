"""`PlacementPlan`: which group holds which expert, and where that group's current life listens.

A plan is immutable and versioned. `homes[layer][expert]` is the actor id of the group that owns
the expert (master and optimizer); `replicas[layer][expert]` are the groups that hold read-only
copies of its committed versions, in the order in which they are asked. `peers` gives the current
incarnation and data-plane endpoint of every group that is alive, so a lost and a rebuilt group are
new plans: a plan may lack a home as long as every expert has a live holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from k3ray.config.model import TextConfig
from k3ray.errors import PlanError
from k3ray.ids import Incarnation, refuse_lower_term

Homes = Mapping[int, tuple[str, ...]]
"""Owning group of each logical expert, by layer."""

Replicas = Mapping[int, tuple[tuple[str, ...], ...]]
"""Groups with a copy of each logical expert, by layer; the home is not among them."""

Held = dict[int, tuple[int, ...]]
"""Logical experts by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPeer:
    """The current life of a group and its endpoint ("ipc:///...", "tcp://host:port")."""

    incarnation: Incarnation
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Version, home and replicas of every (layer, expert), live peers; layers are 0-based MoE
    layers, and one without an entry in `replicas` has none. `layout` numbers the homes and
    replicas: it changes when experts move, not when a group is lost or rebuilt."""

    version: int
    homes: Homes
    peers: Mapping[str, GroupPeer]
    replicas: Replicas = field(default_factory=dict)
    layout: int = 1

    def experts_of(self, group: str) -> Held:
        """Logical expert ids by layer whose home is `group`, ascending; empty layers left out."""
        held = {
            layer: tuple(e for e, home in enumerate(homes) if home == group)
            for layer, homes in self.homes.items()
        }
        return {layer: experts for layer, experts in held.items() if experts}

    def holders(self, layer: int, expert: int) -> tuple[str, ...]:
        """The expert's home, then its replicas, dead or alive."""
        copies = self.replicas.get(layer)
        return (self.homes[layer][expert], *(copies[expert] if copies else ()))

    def owners(self) -> frozenset[str]:
        """Groups that own experts, dead or alive."""
        return frozenset(home for homes in self.homes.values() for home in homes)


def validate_plan(plan: PlacementPlan, text: TextConfig) -> None:
    """Check that every (layer, expert) has exactly one home and a live holder.

    Raises:
        PlanError: names the layer, the expert and what is missing.
    """
    wanted, given = set(text.moe_layers), set(plan.homes)
    if wanted != given:
        raise PlanError(
            f"plan {plan.version} misses layers {sorted(wanted - given)} and has unknown layers "
            f"{sorted(given - wanted)}",
            remedy="rebuild the plan from the model config",
        )
    for layer, homes in plan.homes.items():
        if len(homes) != text.num_experts:
            raise PlanError(
                f"plan {plan.version} places {len(homes)} of {text.num_experts} experts of "
                f"layer {layer}",
                remedy="rebuild the plan from the model config",
                layer=layer,
            )
        for expert in range(len(homes)):
            holders = plan.holders(layer, expert)
            if plan.peers.keys().isdisjoint(holders):
                raise PlanError(
                    f"plan {plan.version}: expert {expert} of layer {layer} lives in "
                    f"{' and '.join(holders)}, which is not among the live groups "
                    f"{sorted(plan.peers)}",
                    remedy="wait until the group is rebuilt",
                    layer=layer,
                    expert=expert,
                    group=holders[0],
                )


def replace_peer(plan: PlacementPlan, peer: GroupPeer) -> PlacementPlan:
    """The next plan, in which `peer` is the current life of its group.

    Raises:
        PlanError: the group is in no plan.
        FencedError: the plan already has a later life of it.
    """
    group = peer.incarnation.actor
    if group not in plan.peers:
        raise PlanError(
            f"{group} is not a group of plan {plan.version}",
            remedy="groups are added by a new layout",
            group=group,
        )
    refuse_lower_term(
        seen=plan.peers[group].incarnation.term, offered=peer.incarnation.term, who=group
    )
    peers: Mapping[str, GroupPeer] = {**plan.peers, group: peer}
    return replace(plan, version=plan.version + 1, peers=peers)
