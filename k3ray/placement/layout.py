"""`Layout`: which groups own and copy which experts; how one layout follows from another.

A layout says who holds what, a plan says who of them lives. A change of the groups is a new layout:
its holders load what they lack, then one plan switches to it. `rescale` moves as little as an even
share allows, exactly: experts with the same holders are interchangeable, so the choice is a small
minimum-cost flow between those classes and the groups. Pure functions.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from k3ray.config.model import TextConfig
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import PlanError
from k3ray.placement.plan import Held, Homes, Replicas

Holders = tuple[str, ...]
"""Groups that hold an expert: its home, then its copies in the order in which they are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """Experts by layer that one group holds, and those of them that it owns (and trains)."""

    owned: Held
    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Holders of every expert, the same in every MoE layer.

    Args:
        number: Grows with every layout of a supernode.
        groups: All groups, in ring order.
        holders: By logical expert.
    """

    number: int
    groups: tuple[str, ...]
    holders: tuple[Holders, ...]

    def homes(self, text: TextConfig) -> Homes:
        """Owning group of each expert, by layer."""
        return dict.fromkeys(text.moe_layers, tuple(h[0] for h in self.holders))

    def replicas(self, text: TextConfig) -> Replicas:
        """Groups with copies of each expert, by layer."""
        return dict.fromkeys(text.moe_layers, tuple(h[1:] for h in self.holders))

    def share(self, group: str, text: TextConfig) -> GroupShare:
        """What `group` holds; nothing if it is none of the layout's."""
        owned = tuple(e for e, holders in enumerate(self.holders) if holders[0] == group)
        held = tuple(e for e, holders in enumerate(self.holders) if group in holders)
        return GroupShare(owned=_by_layer(owned, text), held=_by_layer(held, text))

    def holder_sets(self) -> frozenset[frozenset[str]]:
        """Sets of groups of which one at least must live, for some expert's sake."""
        return frozenset(frozenset(holders) for holders in self.holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """What has to be loaded to go from one layout to another.

    Args:
        loads: (expert, group) of every copy that a group gets new.
        new_homes: Experts whose home changes.
    """

    loads: tuple[tuple[int, str], ...]
    new_homes: tuple[int, ...]


def moves_between(before: Layout, after: Layout) -> MovePlan:
    """What `after` needs beyond `before`."""
    pairs = list(zip(before.holders, after.holders, strict=True))
    return MovePlan(
        loads=tuple(
            (expert, group)
            for expert, (old, new) in enumerate(pairs)
            for group in new
            if group not in old
        ),
        new_homes=tuple(expert for expert, (old, new) in enumerate(pairs) if old[0] != new[0]),
    )


def rescale(before: Layout, groups: Sequence[str], replication: int) -> Layout:
    """The next layout, on `groups`: even shares, every copy in a group of its own, and of all such
    layouts one with the fewest loads (and then the fewest new homes).

    Raises:
        PlanError: fewer groups than holders of an expert, or more groups than experts.

    >>> one = Layout(number=1, groups=("a", "b"), holders=(("a",), ("a",), ("b",), ("b",)))
    >>> rescale(one, ("a", "b", "c", "d"), 1).holders
    (('a',), ('c',), ('b',), ('d',))
    """
    num_experts = len(before.holders)
    if not 1 <= replication <= len(groups) or len(groups) > num_experts:
        raise PlanError(
            f"{len(groups)} groups for {num_experts} experts with replication {replication}: every "
            "copy needs a group of its own, and every group an expert",
            remedy="ask for another number of groups",
            groups=len(groups), experts=num_experts, replication=replication,
        )  # fmt: skip
    free = [tuple(groups)] * num_experts
    holding = _assign(before.holders, free, groups, replication)
    wanted_homes = [old[:1] for old in before.holders]
    homes = _assign(wanted_homes, holding, groups, 1)
    ring = {group: index for index, group in enumerate(groups)}
    return Layout(
        number=before.number + 1,
        groups=tuple(groups),
        holders=tuple(
            (home, *sorted(set(held) - {home}, key=lambda g: (ring[g] - ring[home]) % len(ring)))
            for (home,), held in zip(homes, holding, strict=True)
        ),
    )


def _assign(
    preferred: Sequence[Holders],
    allowed: Sequence[Holders],
    groups: Sequence[str],
    num_each: int,
) -> list[Holders]:
    """`num_each` different groups out of `allowed` for every expert, as many of them `preferred` as
    possible, with even loads (they differ by one at most)."""
    classes: dict[tuple[frozenset[str], frozenset[str]], list[int]] = defaultdict(list)
    for expert, (old, may) in enumerate(zip(preferred, allowed, strict=True)):
        classes[frozenset(old), frozenset(may)].append(expert)
    flow = _min_cost_flow(classes, groups, num_each)
    chosen: dict[int, Holders] = {}
    for index, members in enumerate(classes.values()):
        # Wrap around: a group's run is no longer than the class, so nobody gets it twice.
        runs = [group for group in groups for _ in range(flow[index].get(group, 0))]
        for place, expert in enumerate(members):
            chosen[expert] = tuple(runs[place :: len(members)])
    return [chosen[expert] for expert in range(len(preferred))]


def _min_cost_flow(
    classes: Mapping[tuple[frozenset[str], frozenset[str]], list[int]],
    groups: Sequence[str],
    num_each: int,
) -> list[dict[str, int]]:
    """How many experts of each class each group gets."""
    total = num_each * sum(len(members) for members in classes.values())
    share, larger = divmod(total, len(groups))
    graph = nx.DiGraph()
    graph.add_node("rest", demand=larger)
    for group in groups:
        graph.add_node(("group", group), demand=share)
        graph.add_edge(("group", group), "rest", capacity=1, weight=0)
    for index, ((old, may), members) in enumerate(classes.items()):
        graph.add_node(("class", index), demand=-num_each * len(members))
        for group in groups:
            if group in may:
                graph.add_edge(
                    ("class", index), ("group", group),
                    capacity=len(members), weight=0 if group in old else 1,
                )  # fmt: skip
    flow = nx.min_cost_flow(graph)
    return [
        {group: amount for (_, group), amount in flow["class", index].items()}
        for index in range(len(classes))
    ]


def first_layout(
    partition: Sequence[Sequence[int]], groups: Sequence[str], replication: int, num_experts: int
) -> Layout:
    """The layout of a partition: its parts are homes, and the part of group i is copied to groups
    i + 1, i + 2, ... around the ring, so that the load of a lost group goes to its neighbours.

    Raises:
        PlanError: an expert has no group or two, an id is out of range, or there are fewer groups
            than holders; names them.
    """
    homes = _homes(partition, groups, num_experts)
    if not 1 <= replication <= len(groups):
        raise PlanError(
            f"replication {replication} with {len(groups)} groups: every copy needs its own group",
            remedy="lower replication or add groups",
            replication=replication,
        )
    ring = {
        group: tuple(groups[(index + step) % len(groups)] for step in range(replication))
        for index, group in enumerate(groups)
    }
    return Layout(number=1, groups=tuple(groups), holders=tuple(ring[home] for home in homes))


def _homes(
    partition: Sequence[Sequence[int]], groups: Sequence[str], num_experts: int
) -> tuple[str, ...]:
    if len(partition) != len(groups):
        raise PlanError(
            f"{len(partition)} parts for {len(groups)} groups",
            remedy="give one part per group",
        )
    owners: dict[int, list[str]] = {expert: [] for expert in range(num_experts)}
    for group, part in zip(groups, partition, strict=True):
        for expert in part:
            if expert not in owners:
                raise PlanError(
                    f"{group} owns expert {expert}, experts are 0..{num_experts - 1}",
                    remedy="correct partition",
                    expert=expert,
                )
            owners[expert].append(group)
    wrong = {expert: held for expert, held in owners.items() if len(held) != 1}
    if wrong:
        facts = ", ".join(f"{e}: {'+'.join(h) or 'none'}" for e, h in sorted(wrong.items()))
        raise PlanError(
            f"every expert needs exactly one group, but expert {facts}",
            remedy="correct partition",
            experts=tuple(sorted(wrong)),
        )
    return tuple(held[0] for held in owners.values())


def even_partition(num_experts: int, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous parts whose sizes differ by at most one, larger ones first.

    >>> even_partition(5, 2)
    ((0, 1, 2), (3, 4))

    Raises:
        PlanError: more groups than experts.
    """
    if num_groups > num_experts:
        raise PlanError(
            f"{num_groups} groups for {num_experts} experts: some group would hold none",
            remedy="lower groups",
            groups=num_groups,
            experts=num_experts,
        )
    size, larger = divmod(num_experts, num_groups)
    starts = [index * size + min(index, larger) for index in range(num_groups + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts))


def partition_of(spec: SupernodeSpec, num_experts: int) -> tuple[tuple[int, ...], ...]:
    """The experts of each group as a spec asks for them, an even share each by default.

    Raises:
        PlanError: more groups than experts.
    """
    return spec.partition or even_partition(num_experts, spec.groups)


def joined(shares: Collection[GroupShare]) -> Held:
    """Experts by layer that any of the shares holds."""
    return _union(share.held for share in shares)


def _union(parts: Iterable[Held]) -> Held:
    experts: dict[int, set[int]] = defaultdict(set)
    for part in parts:
        for layer, held in part.items():
            experts[layer].update(held)
    return {layer: tuple(sorted(held)) for layer, held in sorted(experts.items())}


def _by_layer(experts: tuple[int, ...], text: TextConfig) -> Held:
    return dict.fromkeys(text.moe_layers, experts) if experts else {}
