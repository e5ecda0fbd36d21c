"""The controller without Ray: its loop over real processes that stand for actors.

Deaths, stops and fencing are real signals to real processes; only Ray's calls are replaced.
"""

import asyncio
import os
import signal
import socket
import subprocess

import pytest

from k3ray.actors.controller_cluster import (
    own_node,
    process_started,
)
from k3ray.errors import (
    CapacityError,
    FencedError,
    LineBusyError,
    StaleVersionError,
    StepAbortedError,
    StoreError,
)
from k3ray.ids import Incarnation
from tests.support.controller_bench import entry


def test_comes_up_and_says_everything(run):
    async def scenario(bench):
        document = await bench.ready()
        assert document["plan_version"] == 1
        assert [v["latest"] for v in document["versions"]] == [True]
        assert [a["role"] for a in document["actors"]] == [
            "controller", "expert_group", "expert_group", "attention_stack",
        ]  # fmt: skip
        group = entry(document, "group-1")
        assert (group["state"], group["term"], group["experts"]["1"]) == (
            "ready", 1, [4, 5, 6, 7],
        )  # fmt: skip
        assert {d["command"] for d in document["decisions"]} >= {"StartActor", "SwitchPlan"}
        stacks = await bench.core.stacks()
        assert [(s["id"], s["actor_name"]) for s in stacks] == [("stack-0", "stack-0.t1")]

    run(scenario)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_group_is_fenced_and_rebuilt(run, number):
    async def scenario(bench):
        before = entry(await bench.ready(), "group-0")
        waiting = asyncio.create_task(bench.core.wait_plan(1, 10.0))
        os.kill(before["pid"], number)
        plan = await waiting
        assert (plan.version, plan.peers["group-0"].incarnation.term) == (2, 2)
        document = await bench.until(lambda d: d["state"] == "ready")
        assert entry(document, "group-0")["pid"] != before["pid"]
        assert process_started(before["pid"]) == 0.0

    run(scenario)


def test_report_lost_is_verified(run):
    async def scenario(bench):
        await bench.ready()
        life = (await bench.core.plan()).peers["group-0"].incarnation
        assert not await bench.core.report_lost(life, "stack-0")
        pid = bench.actors.processes[life].pid
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # the kernel stops it at its next chance, not at once
        assert await bench.core.report_lost(life, "stack-0")
        assert (await bench.core.wait_plan(1, 10.0)).version == 2

    run(scenario)


def test_training_commits_publishes_and_a_second_trainer_is_refused(run):
    async def scenario(bench):
        await bench.ready()
        core, host = bench.core, socket.gethostname()
        lease = await core.acquire_lease("main", "job-1", host, os.getpid())
        with pytest.raises(LineBusyError, match="job-1"):
            await core.acquire_lease("main", "job-2", host, os.getpid())
        attempt = await core.begin_attempt(lease.id, "main", 1)
        await core.commit_step(lease.id, {"line": "main", "step": 1, "attempt": attempt})
        assert "main@1-" in await bench.publish(lease, 1)
        document = await bench.until(lambda d: [v["step"] for v in d["versions"]] == [1])
        assert document["training"]["main"]["committed_step"] == 1
        for step in (1, 2, 3):
            staged = await core.begin_checkpoint(lease.id, "main", step)
            await core.commit_checkpoint(lease.id, staged, [bench.shard(staged, step)])
        kept = [e.manifest.step for e in bench.store.entries("main", "checkpoint")]
        assert kept == [2, 3]
        await core.release_lease(lease.id)
        await core.acquire_lease("main", "job-2", host, os.getpid())

    run(scenario)


def test_a_publish_waits_for_pins_and_says_so(run):
    async def scenario(bench):
        await bench.ready()
        lease = await bench.core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        await bench.core.pin(None, "req-1")
        with pytest.raises(CapacityError, match="pinned by open requests"):
            await bench.core.begin_publish(lease.id, "main", 1)
        decisions = (await bench.core.status())["decisions"]
        assert [d["command"] for d in decisions].count("WaitForPins") == 1
        await bench.core.unpin("req-1")
        await bench.publish(lease, 1)

    run(scenario)


def test_a_version_that_no_group_can_load_rolls_back(run):
    async def scenario(bench):
        before = (await bench.ready())["versions"]
        lease = await bench.core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        bench.actors.refuse = "main@1-"
        with pytest.raises(StaleVersionError, match="old one serves on"):
            await bench.publish(lease, 1)
        document = await bench.core.status()
        assert (document["versions"], document["state"]) == (before, "ready")
        assert [e.manifest.step for e in bench.store.entries("main")] == [0]
        assert "did not hold it" in document["decisions"][-1]["reason"]

    run(scenario)


def test_the_line_goes_back_to_a_stored_version_and_forward_again(run):
    async def scenario(bench):
        old = (await bench.ready())["versions"][0]["version"]
        core = bench.core
        lease = await core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        new = await bench.publish(lease, 1)
        await bench.until(lambda d: [v["version"] for v in d["versions"]] == [new])
        assert await core.use_version(old) == new
        await bench.until(lambda d: entry(d, "group-0")["versions"] == [old])
        assert await core.use_version(old) == old
        info = await core.weight_info()
        assert (info["version"], [v["state"] for v in info["live"]]) == (old, ["latest"])
        assert [(v["version"], v["live"]) for v in info["stored"]] == [(old, True), (new, False)]
        assert await core.use_version(new) == old
        assert "main@2-" in await bench.publish(lease, 2)

    run(scenario)


def test_a_version_that_cannot_be_had_leaves_the_old_one(run):
    async def scenario(bench):
        old = (await bench.ready())["versions"][0]["version"]
        core = bench.core
        lease = await core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        new = await bench.publish(lease, 1)
        await bench.until(lambda d: entry(d, "group-0")["versions"] == [new])
        for absent in ("main@7-aaaaaaaaaaaa", "other@0-aaaaaaaaaaaa", "main", "../main"):
            with pytest.raises(StoreError):
                await core.use_version(absent)
        bench.actors.refuse = "main@0-"
        with pytest.raises(StaleVersionError, match="old one serves on"):
            await core.use_version(old)
        assert (await core.latest_version()) == new
        assert str(bench.store.open("main", old).version) == old, "a roll-back deleted a version"

    run(scenario)


def test_going_back_waits_for_pins(run):
    async def scenario(bench):
        old = (await bench.ready())["versions"][0]["version"]
        lease = await bench.core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        new = await bench.publish(lease, 1)
        await bench.until(lambda d: [v["version"] for v in d["versions"]] == [new])
        await bench.core.pin(new, "req-1")
        with pytest.raises(CapacityError, match="pinned by open requests"):
            await bench.core.use_version(old)
        waiting = asyncio.create_task(bench.core.use_version(old))
        await asyncio.sleep(0.1)
        await bench.core.unpin("req-1")
        assert await waiting == new

    run(scenario)


def test_a_dead_trainer_loses_its_lease_and_its_step(run):
    async def scenario(bench):
        await bench.ready()
        trainer = subprocess.Popen(["sleep", "1000"])
        lease = await bench.core.acquire_lease("main", "j", socket.gethostname(), trainer.pid)
        await bench.core.begin_attempt(lease.id, "main", 1)
        trainer.kill()
        trainer.wait()
        await bench.until(lambda d: not d["leases"])
        other = await bench.core.acquire_lease("main", "k", socket.gethostname(), os.getpid())
        assert other.term == 2

    run(scenario)


def test_a_group_lost_during_a_step_aborts_it(run):
    async def scenario(bench):
        document = await bench.ready()
        lease = await bench.core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        attempt = await bench.core.begin_attempt(lease.id, "main", 1)
        os.kill(entry(document, "group-1")["pid"], signal.SIGKILL)
        await bench.core.wait_plan(1, 10.0)
        with pytest.raises(StepAbortedError):
            await bench.core.commit_step(lease.id, {"line": "main", "step": 1, "attempt": attempt})
        assert await bench.core.begin_attempt(lease.id, "main", 1) == attempt + 1

    run(scenario)


def test_clients_register_and_lower_terms_are_refused(run):
    async def scenario(bench):
        await bench.ready()
        replica = subprocess.Popen(["sleep", "1000"])
        first = await bench.core.register("ingress", "ingress-0", os.getpid(), own_node(), "")
        second = await bench.core.register(
            "ingress", "ingress-0", replica.pid, own_node(), "http://x"
        )
        assert (first.term, second.term) == (1, 2)
        await bench.core.heartbeat(second)
        with pytest.raises(FencedError):
            await bench.core.heartbeat(first)
        assert entry(await bench.core.status(), "ingress-0")["pid"] == replica.pid
        replica.kill()
        replica.wait()
        await bench.until(lambda d: all(a["id"] != "ingress-0" for a in d["actors"]))

    run(scenario)


def test_a_new_controller_goes_on_with_the_published_version(run):
    published = []

    async def first(bench):
        await bench.ready()
        lease = await bench.core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        published.append(await bench.publish(lease, 7))

    async def second(bench):
        document = await bench.ready()
        assert [v["version"] for v in document["versions"]] == published
        assert document["plan_version"] == 2
        assert entry(document, "controller")["term"] == 2
        assert entry(document, "group-0")["term"] == 2

    run(first)
    run(second)


@pytest.mark.parametrize("first", ["status", "heartbeat", "stacks"])
def test_any_question_begins_a_controller_that_nobody_told_to(run, first):
    """The call by which a restarted life begins may get lost; the world must not wait for it."""

    async def scenario(bench):
        if first == "heartbeat":
            with pytest.raises(FencedError):
                await bench.core.heartbeat(Incarnation(actor="ingress-0", term=1))
        else:
            await getattr(bench.core, first)()
        await bench.until(lambda d: d["state"] == "ready")
        assert await bench.core.begin() == 1  # and it has begun once
        assert len([p for p in bench.actors.processes if p.actor == "group-0"]) == 1

    run(scenario)


def test_stopping_before_the_beginning_starts_nothing(run):
    async def scenario(bench):
        await bench.core.stop()
        assert bench.actors.processes == {}

    run(scenario)


def test_an_unreadable_latest_version_fails_visibly(run, tmp_path):
    async def first(bench):
        await bench.ready()

    async def second(bench):
        for store_entry in bench.store.entries("main"):
            (store_entry.path / "manifest.json").unlink()
        staged = bench.store.stage("main", "version", 9)
        bench.store.commit(staged, [bench.shard(staged, 9)])
        await bench.core.begin()
        document = await bench.until(lambda d: d["state"] == "failed")
        assert "no readable entry" in document["reason"]

    run(first)
    run(second)
