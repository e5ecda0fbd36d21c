"""Control under random histories: it converges, is idempotent, and survives any crash point."""

import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3ray.config.presets import PRESETS
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import FenceActor, HoldLayouts, LoadVersion, PushPlan, StartActor
from k3ray.control.journal import Journal, read_records
from k3ray.control.leases import LeaseRequest
from k3ray.control.records import Size
from k3ray.control.state import fold
from k3ray.errors import K3RayError, ScalingError
from k3ray.placement.layout import even_partition
from tests.support.fake_cluster import FakeCluster, version_of
from tests.support.shares import homes_of

TINY = PRESETS["k3-tiny"].text_config
ACTORS = ("group-0", "group-1", "group-2", "stack-0", "stack-1")
EVENTS = st.one_of(
    st.tuples(st.just("kill"), st.sampled_from(ACTORS)),
    st.tuples(st.just("publish"), st.just("")),
    st.tuples(st.just("pin"), st.sampled_from("abc")),
    st.tuples(st.just("unpin"), st.sampled_from("abc")),
    st.tuples(st.just("lease"), st.just("")),
    st.tuples(st.just("attempt"), st.just("")),
    st.tuples(st.just("ticks"), st.sampled_from(["1", "8"])),
    st.tuples(st.just("scale"), st.tuples(st.integers(1, 5), st.integers(1, 3))),
    st.tuples(st.just("later"), st.sampled_from(["0.3", "12", "70"])),
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def spec_of(groups: int = 3, stacks: int = 2) -> SupernodeSpec:
    return SupernodeSpec(preset="k3-tiny", groups=groups, stacks=stacks)


def play(fake: FakeCluster, events, faults) -> None:
    """Run a history; `faults` says which operations fail, in order."""
    pending = list(faults)

    def fails(command) -> bool:
        risky = isinstance(command, StartActor | LoadVersion | PushPlan | FenceActor | HoldLayouts)
        return risky and bool(pending) and pending.pop(0)

    fake.fails = fails
    fake.supervisor.versions.commit(version_of(0), fake.now_s)
    step, lease = 0, None
    for kind, argument in events:
        fake.check()
        if kind == "kill" and argument in fake.supervisor.actors:
            fake.kill(argument)
        elif kind == "scale" and fake.supervisor.plan() is not None:
            with suppress(ScalingError):
                size = Size(groups=argument[0], stacks=argument[1])
                fake.supervisor.scale(size, "asked for", fake.now_s)
        elif kind == "publish":
            step += 1
            fake.supervisor.versions.commit(version_of(step), fake.now_s)
        elif kind == "pin" and "main" in fake.ledger.state.latest:
            fake.supervisor.versions.pin(
                fake.supervisor.versions.latest("main"), argument, fake.now_s
            )
        elif kind == "unpin":
            fake.supervisor.versions.unpin(argument)
        elif kind == "lease":
            lease = _lease(fake) or lease
        elif kind == "attempt" and lease in fake.ledger.state.leases:
            fake.training.begin_attempt(lease, "main", step + 1, plan=fake.view().plan)
        elif kind == "later":
            fake.now_s += float(argument)
        elif kind == "ticks":
            for _ in range(int(argument)):
                fake.tick()
                fake.now_s += 0.1
    fake.fails = lambda command: False


def _lease(fake: FakeCluster) -> str | None:
    try:
        request = LeaseRequest(line="main", job="j", host="h", pid=1)
        return fake.training.acquire(request, now_s=fake.now_s, now_unix_s=fake.now_s).id
    except K3RayError:
        return None


@QUICK
@given(st.lists(EVENTS, max_size=40), st.lists(st.booleans(), max_size=12))
def test_any_history_converges_to_a_healthy_supernode(events, faults):
    with tempfile.TemporaryDirectory() as folder:
        fake = FakeCluster(spec_of(), Path(folder) / "journal.jsonl")
        play(fake, events, faults)
        for request in "abc":
            fake.supervisor.versions.unpin(request)
        fake.settle(rounds=400)
        assert fake.healthy()
        assert len(fake.view().versions) == 1
        spec = fake.supervisor.spec
        assert len(fake.supervisor.actors) == spec.groups + spec.stacks
        assert fake.decide() == ()


SCALING = st.one_of(
    st.tuples(st.just("scale"), st.tuples(st.integers(1, 5), st.integers(1, 3))),
    st.tuples(st.just("kill"), st.sampled_from((*ACTORS, "group-3", "group-4", "stack-2"))),
    st.tuples(st.just("ticks"), st.sampled_from(["1", "3", "30"])),
    st.tuples(st.just("restart"), st.just("")),
)


@QUICK
@given(st.lists(SCALING, min_size=3, max_size=20), st.lists(st.booleans(), max_size=12))
def test_changes_of_the_size_under_faults_end_in_a_size_that_serves(events, faults):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        fake = FakeCluster(spec_of(), path)
        fake.supervisor.versions.commit(version_of(0), 0.0)
        fake.settle()
        for kind, argument in events:
            if kind == "restart":
                fake = FakeCluster(spec_of(), path, alive=fake.alive, now_s=fake.now_s)
                fake.settle(rounds=400)
            else:
                play(fake, [(kind, argument)], faults)
        fake.settle(rounds=400)
        spec = fake.supervisor.spec
        assert fake.healthy()
        assert fake.supervisor.scaling.view() is None
        assert sorted(fake.alive) == sorted(fake.supervisor.actors)
        assert len(fake.supervisor.actors) == spec.groups + spec.stacks
        last = fake.supervisor.scaling.last
        assert last is None or (last.size.groups, last.size.stacks) == (spec.groups, spec.stacks)


@QUICK
@given(
    st.lists(EVENTS, max_size=25),
    st.lists(st.booleans(), max_size=6),
    st.floats(min_value=0, max_value=1),
)
def test_a_crash_at_any_byte_of_the_journal_keeps_the_invariants(events, faults, cut):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        fake = FakeCluster(spec_of(), path)
        play(fake, events, faults)
        whole = read_records(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(cut * len(data))])
        kept = read_records(path) if path.read_bytes() else ()
        assert kept == whole[: len(kept)]
        fold(kept)
        again = FakeCluster(spec_of(), path, alive=dict(fake.alive), now_s=fake.now_s)
        # What the cut journal never heard of is fenced by Ray's handles; here it is just gone.
        again.alive = {a: t for a, t in again.alive.items() if again.ledger.state.term_of(a) == t}
        again.supervisor.versions.commit(version_of(0), again.now_s) if not (
            again.ledger.state.latest
        ) else None
        again.settle(rounds=400)
        assert again.healthy()
        before, after = fold(kept), again.ledger.state
        assert all(after.term_of(actor) >= before.term_of(actor) for actor in before.actors)
        assert (after.plan.version if after.plan else 0) > (
            before.plan.version if before.plan else 0
        )


@QUICK
@given(st.integers(1, 8), st.integers(8, 40))
def test_even_partitions_cover_every_expert_once(groups, experts):
    parts = even_partition(experts, groups)
    assert sorted(e for part in parts for e in part) == list(range(experts))


@QUICK
@given(st.permutations(range(8)), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_any_split_of_a_permutation_is_a_valid_plan(order, owners):
    names = ("group-0", "group-1", "group-2")
    partition = tuple(
        tuple(e for e, owner in zip(order, owners, strict=True) if owner == index)
        for index in range(3)
    )
    homes = homes_of(partition, names, TINY)
    for layer in TINY.moe_layers:
        assert [names.index(home) for home in homes[layer]] == [
            owners[order.index(e)] for e in range(8)
        ]


def test_journal_is_reopened_by_many_terms(tmp_path):
    path = tmp_path / "journal.jsonl"
    terms = [Journal.open(path).term for _ in range(5)]
    assert terms == [1, 2, 3, 4, 5]
