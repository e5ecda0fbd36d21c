"""`PlacementPlan`: which group holds which expert, and where that group's current life listens.

A plan is immutable and versioned. In this form every expert has exactly one slot (its home);
`homes[layer][expert]` is the actor id of the owning group. `peers` gives each group's current
incarnation and data-plane endpoint, so a rebuilt group is a new plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3ray.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPeer:
    """The current life of a group and its endpoint ("ipc:///...", "tcp://host:port")."""

    incarnation: Incarnation
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Version, home of every (layer, expert), and the peers; layers are 0-based MoE layers."""

    version: int
    homes: Mapping[int, tuple[str, ...]]
    peers: Mapping[str, GroupPeer]

    def experts_of(self, group: str) -> dict[int, tuple[int, ...]]:
        """Logical expert ids by layer held by `group`, ascending; layers without any left out."""
        held = {
            layer: tuple(e for e, home in enumerate(homes) if home == group)
            for layer, homes in self.homes.items()
        }
        return {layer: experts for layer, experts in held.items() if experts}
