"""A controller that follows a dead one takes its actors over: nothing is started anew."""

import asyncio
import os
import signal
import socket
import subprocess

import pytest

from k3ray.actors.controller_cluster import own_node
from tests.support.controller_bench import Bench, entry


async def crash(bench):
    """The controller's process ends: its tasks stop, its actors live, nothing is journaled."""
    await bench.core._loop.stop()
    bench.core._runner.cancel()
    return bench.actors


def lives(document):
    return {a["id"]: (a["term"], a["pid"]) for a in document["actors"] if a["id"] != "controller"}


@pytest.fixture
def two(tmp_path):
    """Run a scenario of two controllers: it gets the first and makes the second."""

    def runner(scenario):
        async def main():
            first = Bench(tmp_path)
            seconds = []

            async def follow():
                seconds.append(Bench(tmp_path, await crash(first)))
                return seconds[-1]

            try:
                await scenario(first, follow)
            finally:
                await seconds[-1].core.stop()
            assert first.actors.processes == {}

        asyncio.run(main())

    return runner


def test_living_actors_and_the_plan_are_taken_over(two):
    async def scenario(first, follow):
        before = await first.ready()
        second = await follow()
        after = await second.ready()
        assert lives(after) == lives(before)
        assert entry(after, "controller")["term"] == 2
        assert after["plan_version"] == before["plan_version"]
        assert after["versions"] == before["versions"]
        assert [d["command"] for d in after["decisions"]] == []
        orders = len(second.actors.orders)
        await asyncio.sleep(0.6)
        assert len(second.actors.orders) == orders, "nobody is asked for anything"

    two(scenario)


@pytest.mark.parametrize("how", ["dead", "stopped", "silent"])
def test_who_does_not_answer_is_replaced_the_others_serve_on(two, how):
    async def scenario(first, follow):
        before = lives(await first.ready())
        actors = await crash(first)
        pid = before["group-0"][1]
        if how == "silent":
            actors.silent.add("group-0")
        else:
            os.kill(pid, signal.SIGKILL if how == "dead" else signal.SIGSTOP)
            os.waitpid(pid, 0 if how == "dead" else os.WUNTRACED)
        second = await follow()
        document = await second.ready()
        after = lives(document)
        assert after["group-0"][0] == 2
        assert after["group-0"][1] != pid
        assert {k: v for k, v in after.items() if k != "group-0"} == {
            k: v for k, v in before.items() if k != "group-0"
        }
        assert document["plan_version"] == 2

    two(scenario)


def test_what_was_under_way_is_finished(two, monkeypatch):
    """A version that a holder lacks; one to be dropped; a stack without the plan."""
    monkeypatch.setattr("k3ray.control.supervisor.PINS_SETTLE_S", 0.1)

    async def scenario(first, follow):
        await first.ready()
        lease = await first.core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        new = await first.publish(lease, 1)
        actors = await crash(first)
        for life, held in actors.holding.items():
            versions = frozenset() if life.actor == "group-1" else held.versions | {"main@9-old"}
            actors.holding[life] = type(held)(versions=versions, plan=0, shares=held.shares)
        second = await follow()
        await second.ready()
        await second.until(lambda d: all(h.versions == {new} for h in actors.holding.values()))
        assert actors.holding[next(i for i in actors.holding if i.actor == "stack-0")].plan >= 1

    two(scenario)


def test_no_version_is_retired_before_the_pins_are_known(two, monkeypatch):
    monkeypatch.setattr("k3ray.control.supervisor.PINS_SETTLE_S", 1.5)

    async def scenario(first, follow):
        old = (await first.ready())["versions"][0]["version"]
        await first.core.pin(old, "req-1")
        lease = await first.core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        first.core._spec = first.core._spec.model_copy(update={"max_live_versions": 2})
        first.core._supervisor.scaling.spec = first.core._spec
        new = await first.publish(lease, 1)
        second = await follow()
        await second.ready()
        await asyncio.sleep(0.5)
        assert [v["version"] for v in (await second.core.status())["versions"]] == [old, new]
        await second.core.pin(old, "req-1")  # the ingress says it again
        await asyncio.sleep(1.5)
        assert [v["version"] for v in (await second.core.status())["versions"]] == [old, new]
        await second.core.unpin("req-1")
        await second.until(lambda d: [v["version"] for v in d["versions"]] == [new])

    two(scenario)


def test_pins_end_some_time_after_their_ingress(two):
    """Killed, or replaced under its name; a request that came back by another one has its own."""

    async def scenario(first, follow):
        old = (await first.ready())["versions"][0]["version"]
        core = first.core
        spec = core._spec.engine.model_copy(update={"orphan_timeout_s": 0.6})
        core._supervisor.scaling.spec = core._supervisor.spec.model_copy(update={"engine": spec})
        process = subprocess.Popen(["sleep", "1000"])
        killed = await core.register("ingress", "ingress-0", process.pid, own_node(), "http://x")
        other = await core.register("ingress", "ingress-1", os.getpid(), own_node(), "http://x")
        await core.pin(None, "req-1", killed)
        await core.pin(None, "req-2", killed)
        await core.pin(None, "req-3", other)
        process.kill()
        process.wait()
        await first.until(lambda d: all(a["id"] != "ingress-0" for a in d["actors"]))
        await core.pin(old, "req-2", other)
        assert (await core.weight_info())["live"][0]["pins"] == 3, "its client may come back"
        await first.until(lambda d: d["versions"][0]["pins"] == 2)
        await core.register("ingress", "ingress-1", os.getpid(), own_node(), "http://x")
        await first.until(lambda d: d["versions"][0]["pins"] == 0)
        await follow()

    two(scenario)


def test_an_open_attempt_outlives_its_controller(two):
    async def scenario(first, follow):
        await first.ready()
        lease = await first.core.acquire_lease("main", "j", socket.gethostname(), os.getpid())
        attempt = await first.core.begin_attempt(lease.id, "main", 1)
        second = await follow()
        await second.ready()
        await second.core.commit_step(lease.id, {"line": "main", "step": 1, "attempt": attempt})
        assert (await second.core.status())["training"]["main"]["committed_step"] == 1

    two(scenario)
