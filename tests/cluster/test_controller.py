"""The controller over real Ray: bring-up, death of each kind of actor, terms, lease, down."""

import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from process_memory import count_found

from k3ray.actors.local_ray import free_port
from k3ray.actors.processes import find_marked
from k3ray.actors.supernode import down, ensure_up
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.home import Home
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.journal import read_records
from k3ray.control.records import ActorLost, SupernodeDown
from k3ray.errors import LineBusyError
from k3ray.weights.names import expert_tensor_names, is_dense_name
from k3ray.weights.store import WeightStore

pytestmark = pytest.mark.cluster

SPEC = SupernodeSpec(preset="k3-tiny", groups=2, stacks=1)


@pytest.fixture(scope="module")
def supernode():
    home = Home(root=Path(tempfile.mkdtemp(prefix="k3ray-ctl-")))
    cluster = LocalClusterConfig(dashboard=False, dashboard_port=free_port())
    saved = dict(os.environ)
    try:
        yield ensure_up(SPEC, home, cluster)
    finally:
        left = down(home)
        os.environ.clear()
        os.environ.update(saved)
        records = read_records(home.journal_file) if home.journal_file.exists() else ()
        shutil.rmtree(home.root, ignore_errors=True)
    assert left == []
    assert find_marked(home.marker) == []
    assert records
    assert isinstance(records[-1], SupernodeDown)


def entry(document, actor):
    return next(a for a in document["actors"] if a["id"] == actor)


def wait_rebuilt(supernode, actor, term, limit_s=60.0):
    started = time.monotonic()
    while time.monotonic() - started < limit_s:
        document = supernode.call("status")
        if entry(document, actor)["term"] > term and document["state"] == "ready":
            return document, time.monotonic() - started
        time.sleep(0.05)
    raise AssertionError(f"{actor} was not rebuilt: {supernode.call('status')['decisions'][-5:]}")


def test_every_actor_is_listed_with_its_experts(supernode):
    document = supernode.call("status")
    assert document["state"] == "ready"
    assert {a["role"] for a in document["actors"]} == {
        "controller", "expert_group", "attention_stack",
    }  # fmt: skip
    held = [entry(document, f"group-{i}")["experts"]["1"] for i in range(2)]
    assert held == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for actor in document["actors"]:
        os.kill(actor["pid"], 0)
    assert [s["id"] for s in supernode.call("stacks")] == ["stack-0"]


@pytest.mark.parametrize(
    ("actor", "number"),
    [
        ("group-0", signal.SIGKILL),
        ("group-1", signal.SIGSTOP),
        ("stack-0", signal.SIGKILL),
        ("stack-0", signal.SIGSTOP),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_lost_actor_is_fenced_and_replaced(supernode, actor, number):
    document = supernode.call("status")
    before = entry(document, actor)
    os.kill(before["pid"], number)
    after, took_s = wait_rebuilt(supernode, actor, before["term"])
    print(f"{actor} {number.name}: serving again after {took_s:.2f} s")
    assert entry(after, actor)["pid"] != before["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(before["pid"], 0)
    raised = after["plan_version"] - document["plan_version"]
    assert raised == (1 if actor.startswith("group") else 0)
    others = [a for a in document["actors"] if a["id"] != actor]
    assert [entry(after, a["id"])["pid"] for a in others] == [a["pid"] for a in others]
    lost = [r for r in read_records(supernode.home.journal_file) if isinstance(r, ActorLost)]
    assert (lost[-1].incarnation.actor, lost[-1].incarnation.term) == (actor, before["term"])


def test_experts_live_in_their_groups_and_not_in_the_stack(supernode):
    """By the bytes in the processes' memory, not by what they say of themselves."""
    document = supernode.call("status")
    store = WeightStore(supernode.home.store_dir).open("main", supernode.call("latest_version"))
    experts = {
        f"group-{group}": [
            name for layer in (1, 2) for expert in range(4 * group, 4 * group + 4)
            for name in expert_tensor_names(layer, expert)
        ]
        for group in range(2)
    }  # fmt: skip
    dense = [n for n in store.names() if is_dense_name(n)]
    needles = {
        "stack-0": [a.tobytes()[:96] for a in store.read(dense).values() if np.std(a) > 0],
        **{
            actor: [a.tobytes()[:96] for a in store.read(n).values()]
            for actor, n in experts.items()
        },
    }
    needles = {a: [n for n in found if len(n) == 96][:12] for a, found in needles.items()}
    assert all(len(found) >= 8 for found in needles.values())
    for holder in needles:
        for actor, wanted in needles.items():
            share = count_found(entry(document, holder)["pid"], wanted) / len(wanted)
            assert share == (1.0 if holder == actor else 0.0), (holder, actor)


def test_one_training_lease(supernode):
    lease = supernode.call("acquire_lease", "main", "one", socket.gethostname(), os.getpid())
    with pytest.raises(LineBusyError, match="one"):
        supernode.call("acquire_lease", "main", "two", socket.gethostname(), os.getpid())
    supernode.call("release_lease", lease.id)
