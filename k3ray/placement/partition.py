"""From a partition of experts to the homes of a plan, and from one plan to the next.

A partition lists, group by group, the logical experts that the group owns in every MoE layer.
Replicas are chained: the part of group i is copied to groups i + 1, i + 2, ... around the ring, so
that the load of a lost group goes to its neighbours. A plan is valid only if every (layer, expert)
has exactly one home and a live holder. Pure functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3ray.config.model import TextConfig
from k3ray.errors import PlanError
from k3ray.ids import refuse_lower_term
from k3ray.placement.plan import GroupPeer, Homes, PlacementPlan, Replicas

Partition = tuple[tuple[int, ...], ...]


def even_partition(num_experts: int, num_groups: int) -> Partition:
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


def homes_of_partition(
    partition: Sequence[Sequence[int]], groups: Sequence[str], text: TextConfig
) -> dict[int, tuple[str, ...]]:
    """Home of every expert of every MoE layer.

    Args:
        partition: For each group the logical experts it owns.
        groups: The groups' actor ids, as many as parts.
        text: Sizes.

    Raises:
        PlanError: an expert has no group or two, or an id is out of range; names them.
    """
    if len(partition) != len(groups):
        raise PlanError(
            f"{len(partition)} parts for {len(groups)} groups",
            remedy="give one part per group",
        )
    owners: dict[int, list[str]] = {expert: [] for expert in range(text.num_experts)}
    for group, part in zip(groups, partition, strict=True):
        for expert in part:
            if expert not in owners:
                raise PlanError(
                    f"{group} owns expert {expert}, experts are 0..{text.num_experts - 1}",
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
    homes = tuple(owners[expert][0] for expert in range(text.num_experts))
    return dict.fromkeys(text.moe_layers, homes)


def chained_replicas(
    homes: Homes, groups: Sequence[str], replication: int
) -> dict[int, tuple[tuple[str, ...], ...]]:
    """Groups that copy each expert of each layer.

    Args:
        homes: Owning groups.
        groups: All groups, in ring order.
        replication: Holders of an expert, its home included.

    Raises:
        PlanError: fewer groups than holders.

    >>> chained_replicas({1: ("a", "b")}, ("a", "b", "c"), 2)
    {1: (('b',), ('c',))}
    """
    if not 1 <= replication <= len(groups):
        raise PlanError(
            f"replication {replication} with {len(groups)} groups: every copy needs its own group",
            remedy="lower replication or add groups",
            replication=replication,
        )
    after = {
        group: tuple(groups[(index + step) % len(groups)] for step in range(1, replication))
        for index, group in enumerate(groups)
    }
    return {layer: tuple(after[home] for home in owners) for layer, owners in homes.items()}


def holder_sets(homes: Homes, replicas: Replicas) -> frozenset[frozenset[str]]:
    """The different sets of groups of which one at least must live, for some expert's sake."""
    return frozenset(
        frozenset((home, *(replicas[layer][expert] if layer in replicas else ())))
        for layer, owners in homes.items()
        for expert, home in enumerate(owners)
    )


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
            remedy="groups are added by a new spec",
            group=group,
        )
    refuse_lower_term(
        seen=plan.peers[group].incarnation.term, offered=peer.incarnation.term, who=group
    )
    peers: Mapping[str, GroupPeer] = {**plan.peers, group: peer}
    return replace(plan, version=plan.version + 1, peers=peers)
