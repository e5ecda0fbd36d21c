"""`PlacementPlan`: which group holds which expert, and where that group's current life listens.

A plan is immutable and versioned. `homes[layer][expert]` is the actor id of the group that owns
the expert (master and optimizer); `replicas[layer][expert]` are the groups that hold read-only
copies of its committed versions, in the order in which they are asked. `peers` gives the current
incarnation and data-plane endpoint of every group that is alive, so a lost and a rebuilt group are
new plans: a plan may lack a home as long as every expert has a live holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from k3ray.ids import Incarnation

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
    layers, and one without an entry in `replicas` has none."""

    version: int
    homes: Homes
    peers: Mapping[str, GroupPeer]
    replicas: Replicas = field(default_factory=dict)

    def experts_of(self, group: str) -> Held:
        """Logical expert ids by layer whose home is `group`, ascending; empty layers left out."""
        return experts_at_home(self.homes, group)

    def holders(self, layer: int, expert: int) -> tuple[str, ...]:
        """The expert's home, then its replicas, dead or alive."""
        copies = self.replicas.get(layer)
        return (self.homes[layer][expert], *(copies[expert] if copies else ()))

    def owners(self) -> frozenset[str]:
        """Groups that own experts, dead or alive."""
        return frozenset(home for homes in self.homes.values() for home in homes)


def experts_at_home(homes: Homes, group: str) -> Held:
    """Logical expert ids by layer whose home is `group`, ascending; empty layers left out."""
    held = {
        layer: tuple(e for e, home in enumerate(layer_homes) if home == group)
        for layer, layer_homes in homes.items()
    }
    return {layer: experts for layer, experts in held.items() if experts}


def experts_held(homes: Homes, replicas: Replicas, group: str) -> Held:
    """`experts_at_home`, and the experts that `group` has a read-only copy of."""
    own = experts_at_home(homes, group)
    held = {
        layer: own.get(layer, ())
        + tuple(e for e, groups in enumerate(replicas.get(layer, ())) if group in groups)
        for layer in homes
    }
    return {layer: tuple(sorted(experts)) for layer, experts in held.items() if experts}
