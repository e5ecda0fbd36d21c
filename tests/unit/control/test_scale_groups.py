"""Another number of expert groups: prepared, switched, retired; or taken back."""

import pytest

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import (
    AbortAttempt,
    EndScale,
    FenceActor,
    HoldLayouts,
    PushPlan,
    RetireLayout,
    RollBackScale,
    StartActor,
    SwitchPlan,
)
from k3ray.control.journal import read_records
from k3ray.control.layouts import SETTLE_S
from k3ray.control.leases import LeaseRequest
from k3ray.control.records import Size
from k3ray.errors import PlanError, ScalingError
from tests.support.fake_cluster import TEXT, FakeCluster, version_of

SPEC = SupernodeSpec(preset="k3-tiny", groups=2, stacks=1)
LAYER = TEXT.moe_layers[0]


def serving(path, spec=SPEC) -> FakeCluster:
    fake = FakeCluster(spec, path / "journal.jsonl")
    fake.supervisor.versions.commit(version_of(0), 0.0)
    fake.settle()
    fake.ordered.clear()
    return fake


def scale(fake, groups, stacks=1):
    return fake.supervisor.scale(Size(groups=groups, stacks=stacks), "asked for", fake.now_s)


def order_of(fake, *kinds):
    return [type(c) for c in fake.ordered if isinstance(c, kinds)]


def homes(fake) -> list[str]:
    return list(fake.supervisor.plan().homes[LAYER])


def groups_of(fake) -> set[str]:
    return {name for name in fake.supervisor.actors if name.startswith("group")}


def test_more_groups_are_prepared_before_one_plan_switches(tmp_path):
    fake = serving(tmp_path)
    before = homes(fake)
    moves = scale(fake, 3)
    assert len(moves.loads) == len(moves.new_homes) == 2
    fake.settle()
    order = order_of(fake, StartActor, HoldLayouts, SwitchPlan, RetireLayout, EndScale)
    switch = order.index(SwitchPlan)
    assert sorted(k.__name__ for k in order[:switch]) == [
        "HoldLayouts",
        "HoldLayouts",
        "StartActor",
    ]
    assert order[switch:] == [SwitchPlan, RetireLayout, *[HoldLayouts] * 3, EndScale]
    after = homes(fake)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 2
    assert fake.supervisor.spec.groups == 3
    assert fake.healthy()
    assert fake.decide() == ()


def test_fewer_groups_end_only_when_every_stack_asks_by_the_new_plan(tmp_path):
    fake = serving(tmp_path, replace_groups(3))
    scale(fake, 2)
    fake.fails = lambda c: isinstance(c, PushPlan)
    for _ in range(30):
        fake.tick()
        fake.now_s += 1.0
    assert groups_of(fake) == {"group-0", "group-1", "group-2"}
    assert not order_of(fake, RetireLayout, FenceActor)
    assert set(homes(fake)) == {"group-0", "group-1"}
    fake.fails = lambda c: False
    fake.settle()
    assert groups_of(fake) == {"group-0", "group-1"}
    assert order_of(fake, RetireLayout, FenceActor, EndScale) == [
        RetireLayout, FenceActor, EndScale,
    ]  # fmt: skip
    assert fake.healthy()


def replace_groups(groups: int, **changes: object) -> SupernodeSpec:
    return SPEC.model_copy(update={"groups": groups, **changes})


@pytest.mark.parametrize("walk", [(3, 5, 2), (1, 8, 4)])
@pytest.mark.parametrize("replication", [1, 2])
def test_a_walk_of_sizes(tmp_path, walk, replication):
    fake = serving(tmp_path, replace_groups(2, replication=replication))
    for size in walk:
        if size < replication:
            with pytest.raises(PlanError, match="needs a group of its own"):
                scale(fake, size)
            continue
        scale(fake, size, stacks=1 + size % 2)
        fake.settle()
        assert fake.healthy()
        assert (fake.supervisor.spec.groups, len(groups_of(fake))) == (size, size)
        assert fake.decide() == ()


def test_a_new_group_that_does_not_start_is_taken_back(tmp_path):
    fake = serving(tmp_path)
    before = homes(fake)
    fake.fails = lambda c: isinstance(c, StartActor) and c.actor == "group-2"
    scale(fake, 3, stacks=2)
    fake.settle()
    assert order_of(fake, SwitchPlan, RollBackScale) == [RollBackScale]
    assert homes(fake) == before
    assert groups_of(fake) == {"group-0", "group-1"}
    assert fake.supervisor.spec.stacks == 1
    last = fake.supervisor.scaling.last
    assert last.ended
    assert "group-2 failed 2 times" in last.failure
    assert fake.healthy()


def test_a_group_that_cannot_take_its_share_is_left_as_it_was(tmp_path):
    fake = serving(tmp_path, replace_groups(3))
    before = homes(fake)
    fake.fails = lambda c: isinstance(c, HoldLayouts) and len(c.layouts) == 2
    scale(fake, 2)
    fake.settle()
    assert order_of(fake, SwitchPlan, RollBackScale) == [RollBackScale]
    assert "does not take its share" in fake.supervisor.scaling.last.failure
    assert homes(fake) == before
    assert fake.healthy()


def test_a_group_lost_while_another_layout_is_prepared_comes_back_for_both(tmp_path):
    fake = serving(tmp_path)
    scale(fake, 3)
    fake.tick()
    fake.kill("group-0")
    fake.settle()
    assert fake.supervisor.spec.groups == 3
    assert fake.healthy()


def test_training_goes_on_under_the_new_plan(tmp_path):
    fake = serving(tmp_path)
    request = LeaseRequest(line="main", job="j", host="h", pid=1)
    lease = fake.training.acquire(request, now_s=fake.now_s, now_unix_s=0.0).id
    fake.training.begin_attempt(lease, "main", 1, plan=fake.view().plan)
    scale(fake, 3)
    for _ in range(12):
        fake.training.renew(lease, now_s=fake.now_s)
        fake.tick()
        fake.now_s += 0.5
    assert order_of(fake, AbortAttempt) == [AbortAttempt]
    assert fake.supervisor.spec.groups == 3
    assert fake.supervisor.plan().layout == 2


def test_a_controller_that_takes_over_before_the_switch_takes_the_groups_back(tmp_path):
    fake = serving(tmp_path)
    scale(fake, 3, stacks=2)
    again = FakeCluster(SPEC, tmp_path / "journal.jsonl", alive=fake.alive, now_s=fake.now_s)
    again.settle()
    assert (again.supervisor.spec.groups, again.supervisor.spec.stacks) == (2, 2)
    assert "before the new layout was ready" in again.supervisor.scaling.last.failure
    assert again.healthy()
    assert scale(again, 3).loads
    again.settle()
    assert again.supervisor.plan().layout == 3  # the number of the one taken back is not used again
    assert again.healthy()


def test_a_controller_that_takes_over_after_the_switch_goes_on(tmp_path):
    fake = serving(tmp_path, replace_groups(3))
    scale(fake, 2)
    while not order_of(fake, SwitchPlan):
        fake.tick()
    assert "group-2" in fake.alive
    again = FakeCluster(replace_groups(3), tmp_path / "journal.jsonl", alive=fake.alive)
    again.settle()
    assert "group-2" not in again.alive
    assert groups_of(again) == {"group-0", "group-1"}
    assert set(homes(again)) == {"group-0", "group-1"}
    assert again.healthy()
    assert again.supervisor.scaling.view() is None


def test_the_old_layout_is_kept_for_what_is_under_way(tmp_path):
    fake = serving(tmp_path)
    scale(fake, 3)
    while not order_of(fake, SwitchPlan):
        fake.tick()
    fake.tick()
    fake.tick()
    assert not order_of(fake, RetireLayout)
    assert fake.view().live_layouts == {1, 2}
    fake.now_s += SETTLE_S
    fake.tick()
    assert order_of(fake, RetireLayout) == [RetireLayout]
    assert fake.view().live_layouts == {2}


def test_one_change_at_a_time_and_no_size_that_cannot_be(tmp_path):
    fake = serving(tmp_path)
    written = len(read_records(tmp_path / "journal.jsonl"))
    with pytest.raises(PlanError, match="9 groups for 8 experts"):
        scale(fake, 9)
    assert fake.supervisor.scaling.view() is None
    assert len(read_records(tmp_path / "journal.jsonl")) == written
    scale(fake, 3)
    with pytest.raises(ScalingError, match="from 2 groups, 1 stacks to 3 groups"):
        scale(fake, 4)
    assert fake.view().next_layout.groups == ("group-0", "group-1", "group-2")
