"""The driver's side of a training job: its lease, and never a silent console."""

import threading
from types import SimpleNamespace

import pytest

from k3ray.errors import DeadlineError, LeaseLostError, LineBusyError
from k3ray.jobs import pretrain
from k3ray.jobs.pretrain import HeldLease, held_lease


class FakeSupernode:
    """Answers lease calls; `renewals` says how each renewal ends."""

    def __init__(self, renewals=(), busy=False):
        self.calls = []
        self._renewals = list(renewals)
        self._busy = busy
        self.renewed = threading.Event()

    def call(self, method, *args, limit_s=10.0):
        self.calls.append(method)
        if method == "acquire_lease":
            if self._busy:
                raise LineBusyError("line 'main' is being trained", remedy="wait")
            return SimpleNamespace(id="lease-1", ttl_s=0.04)
        if method == "renew_lease":
            error = self._renewals.pop(0) if self._renewals else None
            if not self._renewals:
                self.renewed.set()
            if error is not None:
                raise error
        return None


def test_the_lease_is_renewed_and_given_back():
    supernode = FakeSupernode(renewals=[None, DeadlineError("slow", remedy=""), None])
    with held_lease(supernode, "main") as lease:
        assert supernode.renewed.wait(5.0)
        lease.check()
    assert supernode.calls[0] == "acquire_lease"
    assert supernode.calls[-1] == "release_lease"


def test_a_lapsed_lease_is_told_and_not_released():
    supernode = FakeSupernode(renewals=[LeaseLostError("over", remedy="acquire again")])
    lease = HeldLease(supernode, "main")
    assert supernode.renewed.wait(5.0)
    lease.close()
    with pytest.raises(LeaseLostError):
        lease.check()
    assert "release_lease" not in supernode.calls


def test_a_busy_line_is_refused_at_once():
    with pytest.raises(LineBusyError), held_lease(FakeSupernode(busy=True), "main"):
        pass


def test_progress_is_followed_line_by_line_and_silence_is_filled(tmp_path, monkeypatch):
    path = tmp_path / "progress.log"
    path.write_text("of an earlier run\n", encoding="utf-8")
    monkeypatch.setattr(pretrain, "_FOLLOW_S", 0.01)
    monkeypatch.setattr(pretrain, "_QUIET_S", 0.05)
    said, waited, seen = [], threading.Event(), threading.Event()

    def say(line):
        said.append(line)
        if line.startswith("waiting for the train worker"):
            waited.set()
        if line == "step 1/2 loss 5":
            seen.set()

    with pretrain._followed(path, say):
        assert waited.wait(5.0)
        with path.open("a", encoding="utf-8") as file:
            file.write("step 1/2 lo")
            file.flush()
            file.write("ss 5\nstep 2/2 loss 4\n")
        assert seen.wait(5.0)
    lines = [line for line in said if not line.startswith("waiting")]
    assert lines == ["step 1/2 loss 5", "step 2/2 loss 4"]
