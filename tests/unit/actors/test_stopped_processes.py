"""Stopped (SIGSTOP) controllers and ingresses are ended; dead and silent clients are forgotten.

The processes are real; Ray is not there.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from k3ray.actors.controller_clients import ClientRegistry
from k3ray.actors.controller_cluster import own_node, process_started
from k3ray.control.journal import Journal
from k3ray.control.ledger import Ledger
from k3ray.control.supervisor import ProcessFacts
from k3ray.errors import DeadlineError
from k3ray.ids import Role
from k3ray.serve.controller_watch import watch_controller


@pytest.fixture
def spawn() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "1000"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # the kernel stops it at its next chance, not at once


def facts_of(process: subprocess.Popen[bytes]) -> ProcessFacts:
    return ProcessFacts(
        node=own_node(), pid=process.pid, endpoint="",
        process_started_unix_s=process_started(process.pid),
    )  # fmt: skip


def test_a_stopped_controller_is_ended_once_per_life(spawn) -> None:
    lives = [spawn(), spawn()]
    asked = 0

    async def find() -> ProcessFacts:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise DeadlineError("no answer yet")  # the next life needs a moment
        return facts_of(lives[0] if lives[0].poll() is None else lives[1])

    async def scenario() -> None:
        watch = asyncio.create_task(watch_controller(find, stopped_s=0.5))
        await asyncio.sleep(0.6)
        stop(lives[0])
        began_s = time.monotonic()
        while lives[0].poll() is None:
            assert time.monotonic() - began_s < 5.0
            await asyncio.sleep(0.02)
        assert time.monotonic() - began_s >= 0.4, "a short stop is nobody's business"
        await asyncio.sleep(1.2)
        watch.cancel()

    asyncio.run(scenario())
    assert (lives[0].returncode, lives[1].poll(), asked >= 3) == (-signal.SIGKILL, None, True)


def test_a_controller_that_goes_on_in_time_is_left_alone(spawn) -> None:
    controller = spawn()

    async def find() -> ProcessFacts:
        return facts_of(controller)

    async def scenario() -> None:
        watch = asyncio.create_task(watch_controller(find, stopped_s=1.0))
        for _ in range(3):
            await asyncio.sleep(0.4)
            stop(controller)
            await asyncio.sleep(0.4)
            os.kill(controller.pid, signal.SIGCONT)
        watch.cancel()

    asyncio.run(scenario())
    assert controller.poll() is None


@pytest.mark.parametrize(("role", "ended"), [(Role.INGRESS, True), (Role.TRAIN_WORKER, False)])
def test_a_stopped_ingress_is_ended_a_trainer_is_not(spawn, tmp_path, role, ended) -> None:
    """A trainer's lease runs out by itself, and somebody may look at it with a debugger."""
    process = spawn()
    registry = ClientRegistry(
        Ledger(Journal.open(tmp_path / "journal.jsonl")), silence_s=100.0, stopped_s=1.0
    )
    registry.register(role, "client-0", (process.pid, own_node(), "http://x"), now_s=0.0)
    stop(process)
    assert registry.drop_dead(now_s=1.0) == ()
    os.kill(process.pid, signal.SIGCONT)
    while registry._stopped_since:
        registry.drop_dead(now_s=1.5)
    stop(process)
    assert registry.drop_dead(now_s=2.0) == (), "it went on meanwhile: counted anew"
    gone = registry.drop_dead(now_s=3.1)
    assert [client.incarnation.actor for client in gone] == (["client-0"] if ended else [])
    assert (registry.all() == ()) is ended
    if ended:
        assert process.wait(timeout=5.0) == -signal.SIGKILL
