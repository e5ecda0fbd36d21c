"""decide, told through a fake cluster: what is ordered, in which order, and why."""

import itertools

import pytest

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import (
    AbortAttempt,
    ActivateVersion,
    EndScale,
    FenceActor,
    LoadVersion,
    PushPlan,
    RetireVersion,
    RollBackScale,
    StartActor,
    SwitchPlan,
    WaitForPins,
)
from k3ray.control.decide import RESTART_BUDGET, given_up
from k3ray.control.leases import LeaseRequest
from k3ray.control.records import Size, SupernodeDown
from k3ray.control.scale import SETTLE_S
from k3ray.control.versions import admit_publish, publish_refused
from k3ray.control.view import ActorState
from k3ray.errors import ScalingError, StaleVersionError
from tests.support.fake_cluster import FakeCluster, version_of

SPEC = SupernodeSpec(preset="k3-tiny", groups=2, stacks=1)


@pytest.fixture
def cluster(tmp_path):
    fake = FakeCluster(SPEC, tmp_path / "journal.jsonl")
    fake.supervisor.versions.commit(version_of(0), 0.0)
    fake.settle()
    fake.now_s += 100.0
    fake.ordered.clear()
    return fake


def kinds(fake):
    return [type(command) for command in fake.ordered]


def test_first_start_in_order(tmp_path):
    fake = FakeCluster(SPEC, tmp_path / "journal.jsonl")
    fake.supervisor.versions.commit(version_of(0), 0.0)
    fake.settle()
    assert fake.healthy()
    assert kinds(fake) == [
        StartActor, StartActor, StartActor, LoadVersion, LoadVersion, LoadVersion,
        SwitchPlan, ActivateVersion, PushPlan,
    ]  # fmt: skip
    assert all(command.reason for command in fake.ordered)
    assert fake.supervisor.versions.latest("main") == str(version_of(0))


def test_a_lost_group_is_fenced_replaced_loaded_and_then_the_plan_switches(cluster):
    cluster.kill("group-1")
    cluster.settle()
    assert kinds(cluster) == [FenceActor, StartActor, LoadVersion, SwitchPlan, PushPlan]
    assert cluster.supervisor.plan().version == 2
    assert cluster.supervisor.plan().peers["group-1"].incarnation.term == 2
    assert cluster.healthy()


def test_a_lost_stack_leaves_the_plan_alone(cluster):
    cluster.kill("stack-0")
    cluster.settle()
    assert kinds(cluster) == [FenceActor, StartActor, LoadVersion, PushPlan]
    assert cluster.supervisor.plan().version == 1


def test_two_lost_groups_switch_once(cluster):
    cluster.kill("group-0")
    cluster.kill("group-1")
    cluster.settle()
    assert kinds(cluster).count(SwitchPlan) == 1
    assert cluster.healthy()


@pytest.fixture
def replicated(tmp_path):
    """Three groups, two holders of every expert."""
    spec = SupernodeSpec(preset="k3-tiny", groups=3, replication=2, stacks=1)
    fake = FakeCluster(spec, tmp_path / "journal.jsonl")
    fake.supervisor.versions.commit(version_of(0), 0.0)
    fake.settle()
    fake.now_s += 100.0
    fake.ordered.clear()
    return fake


def test_with_replicas_the_plan_first_goes_on_without_the_lost_group(replicated):
    replicated.kill("group-1")
    replicated.settle()
    assert kinds(replicated) == [
        FenceActor, SwitchPlan, StartActor, PushPlan, LoadVersion, SwitchPlan, PushPlan,
    ]  # fmt: skip
    switches = [c for c in replicated.ordered if isinstance(c, SwitchPlan)]
    assert [len(c.peers) for c in switches] == [2, 3]
    assert "gone: group-1" in switches[0].reason
    assert "new: group-1" in switches[1].reason
    assert replicated.healthy()


def test_neighbours_lost_together_leave_the_plan_until_one_is_back(replicated):
    """group-0 and group-1 hold the only two copies of the first part."""
    replicated.kill("group-0")
    replicated.kill("group-1")
    replicated.settle()
    switches = [c for c in replicated.ordered if isinstance(c, SwitchPlan)]
    assert all(len(c.peers) >= 2 for c in switches)
    assert replicated.supervisor.is_whole()
    assert replicated.healthy()


def test_the_first_plan_waits_for_all_groups(tmp_path):
    spec = SupernodeSpec(preset="k3-tiny", groups=3, replication=3, stacks=1)
    fake = FakeCluster(spec, tmp_path / "journal.jsonl")
    fake.supervisor.versions.commit(version_of(0), 0.0)
    fake.settle()
    assert [len(c.peers) for c in fake.ordered if isinstance(c, SwitchPlan)] == [3]


def stack_states(fake):
    return {n: a.state for n, a in fake.supervisor.actors.items() if n.startswith("stack")}


def scale(fake, stacks, groups=2):
    return fake.supervisor.scale(Size(groups=groups, stacks=stacks), "asked for", fake.now_s)


def test_more_stacks_start_and_the_others_are_left_alone(cluster):
    scale(cluster, 3)
    cluster.settle()
    assert kinds(cluster) == [
        StartActor, StartActor, LoadVersion, LoadVersion, PushPlan, PushPlan, EndScale,
    ]  # fmt: skip
    assert cluster.healthy()
    assert cluster.supervisor.scaling.view() is None
    assert len(stack_states(cluster)) == cluster.supervisor.spec.stacks == 3


def test_fewer_stacks_drain_before_they_end(cluster):
    scale(cluster, 3)
    cluster.settle()
    cluster.ordered.clear()
    cluster.loads = {"stack-1": 2, "stack-2": 0}
    scale(cluster, 1)
    assert cluster.tick() == 0  # an ingress may still choose them
    cluster.now_s += SETTLE_S
    cluster.tick()
    assert [c.incarnation.actor for c in cluster.ordered] == ["stack-2"]
    cluster.tick()
    assert set(stack_states(cluster)) == {"stack-0", "stack-1"}
    cluster.now_s += SPEC.deadlines.drain_s
    cluster.settle()
    assert "2 requests go on elsewhere" in next(
        c.reason for c in cluster.ordered if isinstance(c, FenceActor)
        and c.incarnation.actor == "stack-1"
    )  # fmt: skip
    assert set(stack_states(cluster)) == {"stack-0"}
    assert kinds(cluster)[-1] is EndScale
    assert cluster.healthy()


def test_a_new_stack_that_does_not_start_is_taken_back(cluster):
    cluster.fails = lambda c: isinstance(c, StartActor) and c.actor == "stack-1"
    scale(cluster, 2)
    cluster.settle()
    assert kinds(cluster).count(RollBackScale) == 1
    assert set(stack_states(cluster)) == {"stack-0"}
    assert cluster.supervisor.spec.stacks == 1
    assert cluster.supervisor.scaling.view() is None
    assert "back to 2 groups, 1 stacks" in next(
        c.reason for c in cluster.ordered if isinstance(c, RollBackScale)
    )
    assert cluster.healthy()


def test_a_new_controller_goes_on_with_the_change(cluster, tmp_path):
    scale(cluster, 2)
    again = FakeCluster(SPEC, tmp_path / "journal.jsonl", alive=cluster.alive)
    again.settle()
    assert again.supervisor.spec.stacks == 2
    assert set(stack_states(again)) == {"stack-0", "stack-1"}
    assert again.healthy()
    scale(again, 1)
    last = FakeCluster(SPEC, tmp_path / "journal.jsonl", alive=again.alive)
    last.settle()
    assert set(stack_states(last)) == {"stack-0"}
    assert last.healthy()


def test_one_change_at_a_time(cluster):
    scale(cluster, 2)
    with pytest.raises(ScalingError, match="from 2 groups, 1 stacks to 2 groups, 2 stacks"):
        scale(cluster, 3)


def test_the_supernode_that_comes_up_anew_has_its_own_number(cluster, tmp_path):
    scale(cluster, 2)
    cluster.settle()
    cluster.ledger.write(SupernodeDown(reason="test"))
    again = FakeCluster(SPEC, tmp_path / "journal.jsonl")
    assert again.supervisor.spec.stacks == 1


def test_a_start_that_hangs_is_fenced_at_its_deadline(cluster):
    cluster.kill("group-0")
    cluster.tick()
    cluster.supervisor.begin_life("group-0", cluster.now_s)
    cluster.now_s += SPEC.deadlines.start_s - 0.1
    assert cluster.decide() == ()
    cluster.now_s += 0.2
    (fence,) = cluster.decide()
    assert isinstance(fence, FenceActor)
    assert "start_s" in fence.reason


def test_failing_starts_back_off_and_end(cluster):
    cluster.fails = lambda c: isinstance(c, StartActor)
    cluster.kill("group-0")
    times = []
    for _ in range(2000):
        times += [cluster.now_s for c in cluster.decide() if isinstance(c, StartActor)]
        cluster.tick()
        cluster.now_s += 0.1
    assert len(times) == RESTART_BUDGET
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 5
    assert given_up(cluster.supervisor.actors["group-0"])


def test_repeated_kills_of_healthy_lives_do_not_use_up_the_budget(cluster):
    for _ in range(3 * RESTART_BUDGET):
        cluster.kill("group-0")
        cluster.settle()
    assert cluster.healthy()


def test_late_news_of_an_old_life_is_ignored(cluster):
    old = cluster.supervisor.actors["group-0"].incarnation
    cluster.kill("group-0")
    cluster.settle()
    assert not cluster.supervisor.observe_lost(old, "late report", cluster.now_s)
    assert cluster.supervisor.actors["group-0"].state is ActorState.READY


def test_publish_activates_everywhere_then_retires_the_old(cluster):
    cluster.supervisor.versions.commit(version_of(5), cluster.now_s)
    cluster.settle()
    assert cluster.supervisor.versions.latest("main") == str(version_of(5))
    order = kinds(cluster)
    assert order.index(ActivateVersion) > max(
        i for i, kind in enumerate(order) if kind is LoadVersion
    )
    assert order.index(RetireVersion) > order.index(ActivateVersion)
    assert [v.version for v in cluster.view().versions] == [str(version_of(5))]
    assert cluster.healthy()


def test_a_version_that_cannot_be_loaded_rolls_back(cluster):
    bad = str(version_of(5))
    cluster.fails = lambda c: isinstance(c, LoadVersion) and c.version == bad
    cluster.supervisor.versions.commit(version_of(5), cluster.now_s)
    cluster.settle()
    assert cluster.supervisor.versions.latest("main") == str(version_of(0))
    retired = [c for c in cluster.ordered if isinstance(c, RetireVersion)]
    assert [(c.version, c.failed) for c in retired] == [(bad, True)]
    assert cluster.healthy()


def test_pins_keep_versions_and_a_third_publish_waits_and_says_so(cluster):
    boss = cluster.supervisor
    for step in (1, 2):
        boss.versions.pin(boss.versions.latest("main"), f"req-{step}", cluster.now_s)
        cluster.now_s += 10
        if step == 1:
            assert admit_publish(SPEC, cluster.view(), "main", cluster.now_s) is None
            boss.versions.commit(version_of(step), cluster.now_s)
            cluster.settle()
    wait = admit_publish(SPEC, cluster.view(), "main", cluster.now_s)
    assert isinstance(wait, WaitForPins)
    assert [pin.request_id for pin in wait.pins] == ["req-1", "req-2"]
    error = publish_refused(wait, waited_s=30.0, now_s=cluster.now_s)
    assert "max_live_versions is 2" in str(error)
    assert error.fields["pins"][0][:2] == ("req-1", str(version_of(0)))
    boss.versions.commit(version_of(2), cluster.now_s)
    for _ in range(5):
        cluster.tick()
    assert boss.versions.latest("main") == str(version_of(1))
    boss.versions.unpin("req-1")
    cluster.settle()
    assert boss.versions.latest("main") == str(version_of(2))
    assert {v.version for v in cluster.view().versions} == {
        str(version_of(1)), str(version_of(2)),
    }  # fmt: skip


def test_pins_age_out_and_dead_versions_cannot_be_pinned(cluster):
    boss = cluster.supervisor
    old = boss.versions.latest("main")
    boss.versions.pin(old, "req-1", cluster.now_s)
    boss.versions.commit(version_of(1), cluster.now_s)
    for _ in range(6):
        cluster.tick()
    assert {v.version for v in cluster.view().versions} == {old, str(version_of(1))}
    cluster.now_s += SPEC.max_pin_age_s
    cluster.settle()
    assert [v.version for v in cluster.view().versions] == [str(version_of(1))]
    with pytest.raises(StaleVersionError, match="is not live"):
        boss.versions.pin(old, "req-2", cluster.now_s)


def test_a_lost_group_aborts_the_open_attempt(cluster):
    request = LeaseRequest(line="main", job="j", host="h", pid=1)
    lease = cluster.training.acquire(request, now_s=cluster.now_s, now_unix_s=0.0)
    cluster.training.begin_attempt(lease.id, "main", 1, plan=1)
    assert cluster.decide() == ()
    cluster.kill("group-0")
    abort = next(c for c in cluster.decide() if isinstance(c, AbortAttempt))
    assert "group-0 was lost" in abort.reason
    cluster.tick()
    assert cluster.training.attempts() == ()


def test_a_restarted_controller_fences_what_is_left_and_keeps_its_versions(cluster):
    cluster.supervisor.versions.commit(version_of(3), cluster.now_s)
    cluster.settle()
    again = FakeCluster(SPEC, cluster.journal_file, alive=dict(cluster.alive))
    again.settle()
    assert again.ledger.term == 2
    assert again.supervisor.versions.latest("main") == str(version_of(3))
    assert again.supervisor.plan().version == 2
    assert {a.term for a in again.supervisor.actors.values()} == {2}
    assert again.healthy()
