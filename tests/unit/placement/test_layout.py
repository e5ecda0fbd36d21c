"""Layouts: even, whole, and reached with the fewest moves."""

import itertools

import pytest

from k3ray.config.presets import PRESETS
from k3ray.errors import PlanError
from k3ray.placement.layout import (
    GroupShare,
    Layout,
    even_partition,
    first_layout,
    joined,
    moves_between,
    rescale,
)

TINY = PRESETS["k3-tiny"].text_config


def names(number: int) -> tuple[str, ...]:
    return tuple(f"group-{index}" for index in range(number))


def layout_on(number: int, *, experts: int = 8, replication: int = 1) -> Layout:
    return first_layout(even_partition(experts, number), names(number), replication, experts)


def check_even(layout: Layout, replication: int) -> None:
    """Every expert has its copies in different groups, and shares differ by one at most."""
    assert all(len(set(h)) == len(h) == replication for h in layout.holders)
    for counted in (
        [sum(g in h for h in layout.holders) for g in layout.groups],
        [sum(g == h[0] for h in layout.holders) for g in layout.groups],
    ):
        assert max(counted) - min(counted) <= 1
        assert min(counted) >= 1


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_any_walk_of_sizes_stays_even_and_whole(replication):
    layout = layout_on(3, replication=replication)
    for size in (4, 8, 5, 3, 6, 3, 7):
        after = rescale(layout, names(size), replication)
        check_even(after, replication)
        assert after.number == layout.number + 1
        layout = after


def fewest_loads(before: Layout, groups: tuple[str, ...], replication: int) -> int:
    """By trying every even assignment of holders."""
    choices = list(itertools.combinations(groups, replication))
    fewest = None
    for picked in itertools.product(choices, repeat=len(before.holders)):
        counts = [sum(g in h for h in picked) for g in groups]
        if max(counts) - min(counts) > 1:
            continue
        loads = sum(
            len(set(new) - set(old)) for old, new in zip(before.holders, picked, strict=True)
        )
        fewest = loads if fewest is None else min(fewest, loads)
    assert fewest is not None
    return fewest


@pytest.mark.parametrize(
    ("experts", "before", "after", "replication"),
    [(6, 2, 3, 1), (6, 3, 2, 1), (5, 2, 4, 1), (7, 4, 3, 1),
     (5, 2, 3, 2), (5, 3, 2, 2), (4, 4, 3, 2)],
)  # fmt: skip
def test_loads_are_the_fewest_of_all_even_layouts(experts, before, after, replication):
    layout = layout_on(before, experts=experts, replication=replication)
    moved = moves_between(layout, rescale(layout, names(after), replication))
    assert len(moved.loads) == fewest_loads(layout, names(after), replication)


def test_an_uneven_layout_becomes_even_with_the_fewest_loads():
    layout = first_layout(((0,), (1, 2, 3, 4, 5)), names(2), 1, 6)
    after = rescale(layout, names(3), 1)
    check_even(after, 1)
    assert len(moves_between(layout, after).loads) == fewest_loads(layout, names(3), 1)


def test_only_homes_that_went_away_change():
    layout = layout_on(3, experts=6, replication=2)
    after = rescale(layout, names(2), 2)
    moved = moves_between(layout, after)
    lost = [e for e, holders in enumerate(layout.holders) if holders[0] == "group-2"]
    assert lost == list(moved.new_homes)
    assert len(moved.loads) == 4  # both groups hold all six now, and held four each
    check_even(after, 2)


def test_the_same_groups_move_nothing():
    layout = layout_on(4)
    moved = moves_between(layout, rescale(layout, names(4), 1))
    assert (moved.loads, moved.new_homes) == ((), ())


@pytest.mark.parametrize(("groups", "replication"), [(9, 1), (2, 3), (1, 0)])
def test_sizes_that_cannot_be_are_refused(groups, replication):
    with pytest.raises(PlanError, match=f"{groups} groups for 8 experts"):
        rescale(layout_on(2), names(groups), replication)


def test_shares_by_layer():
    layout = layout_on(3, replication=2)
    share = layout.share("group-1", TINY)
    layer = TINY.moe_layers[0]
    assert share.owned[layer] == (3, 4, 5)
    assert share.held[layer] == (0, 1, 2, 3, 4, 5)
    assert layout.share("group-9", TINY) == GroupShare(owned={}, held={})
    other = layout.share("group-2", TINY)
    assert joined([share, other])[layer] == tuple(range(8))


def test_a_release_sized_layout_is_quick():
    layout = first_layout(even_partition(896, 64), names(64), 2, 896)
    after = rescale(layout, names(65), 2)
    check_even(after, 2)
    # The new group gets its share and nobody else anything.
    assert {group for _, group in moves_between(layout, after).loads} == {"group-64"}
