"""What a group holds, for tests that know only one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3ray.config.model import TextConfig
from k3ray.placement.layout import GroupShare, first_layout
from k3ray.placement.plan import Homes

Experts = Mapping[int, tuple[int, ...]]


def only_share(owned: Experts, held: Experts | None = None) -> dict[int, GroupShare]:
    """Shares by layout: layout 1, in which a group owns `owned` and holds `held` (or just that)."""
    return {1: GroupShare(owned=dict(owned), held=dict(owned if held is None else held))}


def homes_of(partition: Sequence[Sequence[int]], groups: Sequence[str], cfg: TextConfig) -> Homes:
    """Homes by layer of a partition."""
    return first_layout(partition, groups, 1, cfg.num_experts).homes(cfg)
