"""Leases and step commits."""

import pickle

import pytest

from k3ray.control.journal import Journal, read_records
from k3ray.control.leases import LeaseRequest
from k3ray.control.ledger import Ledger
from k3ray.control.records import StepCommitted
from k3ray.control.training import TrainingLedger
from k3ray.errors import (
    DataError,
    JournalError,
    LeaseLostError,
    LineBusyError,
    StepAbortedError,
)

ALIVE = {"group-0": 1, "group-1": 2}


@pytest.fixture
def training(tmp_path):
    return TrainingLedger(Ledger(Journal.open(tmp_path / "j.jsonl")), ttl_s=30.0, now_s=0.0)


def ask(job="train", line="main"):
    return LeaseRequest(line=line, job=job, host="box", pid=42)


def body(step, attempt, **more):
    return {"line": "main", "step": step, "attempt": attempt, **more}


def test_one_lease_per_line(training):
    lease = training.acquire(ask(), now_s=0.0, now_unix_s=1000.0)
    assert (lease.term, lease.ttl_s) == (1, 30.0)
    with pytest.raises(LineBusyError, match=r"job 'train' \(pid 42 on box\) for 7 s") as caught:
        training.acquire(ask("other"), now_s=7.0, now_unix_s=1007.0)
    assert pickle.loads(pickle.dumps(caught.value)).fields["age_s"] == 7.0
    assert training.acquire(ask("other", "branch"), now_s=7.0, now_unix_s=1007.0).term == 1
    training.end(lease.id, "released")
    training.end(lease.id, "released")
    assert training.acquire(ask("other"), now_s=8.0, now_unix_s=1008.0).term == 2
    with pytest.raises(LeaseLostError):
        training.renew(lease.id, now_s=9.0)


def test_renewal_moves_the_deadline(training):
    lease = training.acquire(ask(), now_s=0.0, now_unix_s=0.0)
    training.renew(lease.id, now_s=20.0)
    assert training.leases()[0].deadline_s == 50.0


def test_commit_is_fsynced_and_idempotent(training):
    lease = training.acquire(ask(), now_s=0.0, now_unix_s=0.0)
    attempt = training.begin_attempt(lease.id, "main", 1, plan=1)
    record = body(1, attempt, loss=2.5, holder_digests={"group-0#1": "aa", "worker-0#9": "bb"})
    for _ in range(2):
        training.commit_step(lease.id, record, alive=ALIVE)
    on_disk = read_records(training.ledger.journal.path)
    steps = [r for r in on_disk if isinstance(r, StepCommitted)]
    assert [(s.step, s.body["loss"]) for s in steps] == [(1, 2.5)]


def test_only_the_open_attempt_commits(training):
    lease = training.acquire(ask(), now_s=0.0, now_unix_s=0.0)
    first = training.begin_attempt(lease.id, "main", 1, plan=1)
    second = training.begin_attempt(lease.id, "main", 1, plan=1)
    assert second == first + 1
    with pytest.raises(StepAbortedError, match="attempt 2 of step 1 is open"):
        training.commit_step(lease.id, body(1, first), alive=ALIVE)
    training.abort("main", "test")
    with pytest.raises(StepAbortedError, match="none is open"):
        training.commit_step(lease.id, body(1, second), alive=ALIVE)
    with pytest.raises(DataError):
        training.commit_step(lease.id, {"line": "main"}, alive=ALIVE)


@pytest.mark.parametrize("alive", [{"group-0": 2}, {"group-0": 0}], ids=["replaced", "dead"])
def test_acks_of_dead_holders_count_nothing(training, alive):
    lease = training.acquire(ask(), now_s=0.0, now_unix_s=0.0)
    attempt = training.begin_attempt(lease.id, "main", 1, plan=1)
    record = body(1, attempt, holder_digests={"group-0#1": "aa"})
    with pytest.raises(StepAbortedError, match="group-0#1 is not alive"):
        training.commit_step(lease.id, record, alive=alive)


def test_the_end_of_a_lease_aborts_its_step(training):
    lease = training.acquire(ask(), now_s=0.0, now_unix_s=0.0)
    attempt = training.begin_attempt(lease.id, "main", 4, plan=1)
    training.end(lease.id, "lapsed")
    assert training.attempts() == ()
    with pytest.raises(LeaseLostError):
        training.commit_step(lease.id, body(4, attempt), alive=ALIVE)
    other = training.acquire(ask("next"), now_s=1.0, now_unix_s=1.0)
    assert training.begin_attempt(other.id, "main", 4, plan=1) == attempt + 1


def test_attempt_numbers_never_repeat_after_going_back(training):
    lease = training.acquire(ask(), now_s=0.0, now_unix_s=0.0)
    seen = set()
    for step in (1, 2, 3, 2, 3):
        attempt = training.begin_attempt(lease.id, "main", step, plan=1)
        assert (step, attempt) not in seen
        seen.add((step, attempt))
        training.commit_step(lease.id, body(step, attempt), alive=ALIVE)
    assert training.ledger.state.steps["main"].step == 3


def test_ledger_refuses_contradictions_before_it_writes(training):
    path = training.ledger.journal.path
    before = path.read_bytes()
    with pytest.raises(JournalError, match="contradicts"):
        training.ledger.write(StepCommitted(lease_id="x", line="main", step=1, attempt=1, body={}))
    assert path.read_bytes() == before


def test_leases_survive_a_controller_with_a_fresh_deadline(training):
    lease = training.acquire(ask(), now_s=0.0, now_unix_s=0.0)
    ledger = Ledger(Journal.open(training.ledger.journal.path))
    again = TrainingLedger(ledger, ttl_s=30.0, now_s=500.0)
    assert again.leases()[0].deadline_s == 530.0
    assert again.renew(lease.id, now_s=510.0).id == lease.id
