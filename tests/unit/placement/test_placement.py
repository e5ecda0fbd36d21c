"""Partitions, plans and the fit arithmetic."""

from dataclasses import replace

import pytest

from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.count import count_parameters
from k3ray.config.presets import PRESETS
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import ConfigError, FencedError, PlacementError, PlanError
from k3ray.ids import Incarnation
from k3ray.placement.fits import check_fits, check_resources, group_bytes
from k3ray.placement.layout import even_partition, first_layout
from k3ray.placement.plan import GroupPeer, PlacementPlan, replace_peer, validate_plan
from tests.support.shares import homes_of

TINY = PRESETS["k3-tiny"].text_config


def peer(actor: str, term: int = 1) -> GroupPeer:
    return GroupPeer(
        incarnation=Incarnation(actor=actor, term=term), endpoint=f"ipc:///{actor}.{term}"
    )


def plan_of(partition) -> PlacementPlan:
    groups = tuple(f"group-{i}" for i in range(len(partition)))
    return PlacementPlan(
        version=1,
        homes=homes_of(partition, groups, TINY),
        peers={group: peer(group) for group in groups},
    )


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5, 8])
def test_even_partition_is_whole_and_even(num_groups):
    parts = even_partition(8, num_groups)
    assert [e for part in parts for e in part] == list(range(8))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_groups_than_experts():
    with pytest.raises(PlanError, match="9 groups for 8 experts"):
        even_partition(8, 9)


def test_uneven_partition_makes_a_valid_plan():
    plan = plan_of(((7, 0, 3), (1, 2, 4, 5, 6)))
    validate_plan(plan, TINY)
    assert plan.experts_of("group-0") == dict.fromkeys(TINY.moe_layers, (0, 3, 7))


@pytest.mark.parametrize(
    ("partition", "text"),
    [
        (((0, 1, 2, 3), (4, 5, 6)), "expert 7: none"),
        (((0, 1, 2, 3), (3, 4, 5, 6, 7)), r"expert 3: group-0\+group-1"),
        (((0, 1, 2, 3), (4, 5, 6, 8)), "owns expert 8"),
    ],
)
def test_wrong_partitions_name_the_expert(partition, text):
    with pytest.raises(PlanError, match=text):
        plan_of(partition)


def test_plan_gaps_are_named():
    plan = plan_of(even_partition(8, 2))
    dead = PlacementPlan(version=2, homes=plan.homes, peers={"group-0": peer("group-0")})
    with pytest.raises(PlanError, match="expert 4 of layer 1 lives in group-1"):
        validate_plan(dead, TINY)
    first = TINY.moe_layers[0]
    missing = {layer: homes for layer, homes in plan.homes.items() if layer != first}
    with pytest.raises(PlanError, match=rf"misses layers \[{first}\]"):
        validate_plan(PlacementPlan(version=2, homes=missing, peers=plan.peers), TINY)
    short = {**plan.homes, first: plan.homes[first][:-1]}
    with pytest.raises(PlanError, match="places 7 of 8"):
        validate_plan(PlacementPlan(version=2, homes=short, peers=plan.peers), TINY)


def test_replace_peer_fences_lower_terms():
    plan = plan_of(even_partition(8, 2))
    newer = replace_peer(plan, peer("group-1", 4))
    assert (newer.version, newer.peers["group-1"].incarnation.term) == (2, 4)
    assert plan.peers["group-1"].incarnation.term == 1
    with pytest.raises(FencedError):
        replace_peer(newer, peer("group-1", 3))
    with pytest.raises(PlanError):
        replace_peer(newer, peer("group-9"))


def test_fit_says_the_arithmetic():
    spec = SupernodeSpec(preset="k3-tiny", groups=3, stacks=2)
    offered = {"k3_group": 3.0, "k3_stack": 2.0, "memory": 16.0 * 2**30}
    assert any("16.00 GiB offered" in line for line in check_resources(spec, TINY, offered))
    with pytest.raises(PlacementError, match="k3_group: 3 needed, 2 offered") as caught:
        check_resources(spec, TINY, {**offered, "k3_group": 2.0})
    assert caught.value.fields["short"] == ("k3_group",)
    big = SupernodeSpec(preset="kimi-k3", groups=2, stacks=1)
    with pytest.raises(PlacementError, match="memory"):
        check_resources(big, PRESETS["kimi-k3"].text_config, offered)


def test_fit_of_a_local_cluster():
    cluster = LocalClusterConfig(resources={"k3_group": 2, "k3_stack": 1})
    spec = SupernodeSpec(preset="k3-tiny", groups=2)
    assert check_fits(spec, cluster, memory_bytes=8 * 2**30)
    with pytest.raises(PlacementError, match=r"0\.50 GiB offered"):
        check_fits(spec, cluster, memory_bytes=2**29)
    with pytest.raises(ConfigError, match="k3-nano"):
        check_fits(SupernodeSpec(preset="k3-nanno"), cluster)


@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_chained_replicas_are_elsewhere_and_even(num_groups):
    groups = tuple(f"group-{i}" for i in range(num_groups))
    parts = even_partition(8, num_groups)
    for replication in range(1, num_groups + 1):
        layout = first_layout(parts, groups, replication, 8)
        plan = PlacementPlan(
            version=1, homes=layout.homes(TINY), replicas=layout.replicas(TINY), peers={}
        )
        for layer in TINY.moe_layers:
            for expert in range(8):
                holders = plan.holders(layer, expert)
                assert len(set(holders)) == len(holders) == replication
        held = [layout.share(group, TINY).held for group in groups]
        assert sum(len(h[TINY.moe_layers[0]]) for h in held) == 8 * replication
        lost = {g: peer(g) for g in groups[replication - 1 :]}
        validate_plan(replace(plan, peers=lost), TINY)  # all but `replication - 1` groups live
        assert all(len(holders) == replication for holders in layout.holder_sets())
    for wrong in (0, num_groups + 1):
        with pytest.raises(PlanError, match=f"replication {wrong}"):
            first_layout(parts, groups, wrong, 8)


def test_a_plan_without_any_holder_is_refused():
    plan = plan_of(even_partition(8, 3))
    groups = tuple(plan.peers)
    replicas = first_layout(even_partition(8, 3), groups, 2, 8).replicas(TINY)
    only = replace(plan, replicas=replicas, peers={"group-2": peer("group-2")})
    with pytest.raises(PlanError, match="expert 0 of layer 1 lives in group-0 and group-1"):
        validate_plan(only, TINY)


def test_copies_cost_memory_but_no_training_state():
    one, two = (
        check_resources(
            SupernodeSpec(preset="k3-tiny", groups=2, replication=r), TINY,
            {"k3_group": 2.0, "k3_stack": 1.0},
        )[-1]
        for r in (1, 2)
    )  # fmt: skip
    assert "replication 2" in two
    assert one != two
    own = group_bytes(TINY, 4, 2)
    copied = group_bytes(TINY, 4, 2, num_copied=4) - own
    assert copied == 4 * len(TINY.moe_layers) * count_parameters(TINY).per_expert * 4 * 3
    with pytest.raises(ValueError, match="replication is 3 but groups is 2"):
        SupernodeSpec(groups=2, replication=3)
