from __future__ import annotations

import asyncio
import threading

import pytest

from k3ray.actors.event_signal import EventSignal
from k3ray.actors.plan_holder import PlanHolder
from k3ray.clock import Deadline
from k3ray.errors import DeadlineError, PlanError
from k3ray.placement.plan import PlacementPlan


def make_plan(version: int) -> PlacementPlan:
    return PlacementPlan(version=version, homes={}, peers={})


def soon(limit_s: float) -> Deadline:
    return Deadline.after(limit_s, operation="wait for a plan", peer="controller")


def test_only_newer_plans_are_taken() -> None:
    holder = PlanHolder()
    with pytest.raises(PlanError):
        holder.current()
    assert holder.version == 0
    assert holder.set(make_plan(2)) == 2
    assert holder.set(make_plan(1)) == 2
    assert holder.current().version == 2


def test_wait_newer_wakes_and_names_its_deadline() -> None:
    holder = PlanHolder(make_plan(1))
    assert holder.wait_newer(0, soon(0.0)).version == 1
    with pytest.raises(DeadlineError, match="wait for a plan with controller"):
        holder.wait_newer(1, soon(0.01))
    setter = threading.Timer(0.01, holder.set, args=(make_plan(2),))
    setter.start()
    assert holder.wait_newer(1, soon(10.0)).version == 2
    setter.join()


def test_a_ticket_taken_before_looking_misses_nothing() -> None:
    async def scenario() -> None:
        signal = EventSignal(asyncio.get_running_loop())
        ticket = signal.ticket()
        notifier = threading.Thread(target=signal.notify)
        notifier.start()
        async with asyncio.timeout(10):
            await ticket.wait()
        notifier.join()
        assert not signal.ticket().is_set()
        signal.notify()
        signal.notify()
        async with asyncio.timeout(10):
            await signal.ticket().wait()

    asyncio.run(scenario())
