"""What the controller asks of a living actor, command by command, and what an answer changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from k3ray.actors.controller_cluster import ActorCluster
from k3ray.control.commands import (
    LAYOUTS_KEY,
    DropVersion,
    HoldLayouts,
    LoadVersion,
    PushPlan,
    load_key,
    plan_key,
)
from k3ray.control.supervisor import Supervisor
from k3ray.control.view import ActorView
from k3ray.errors import SupernodeError

Order = LoadVersion | DropVersion | PushPlan | HoldLayouts

Change = Callable[[ActorView], ActorView]
"""Puts an answer into the actor's view."""


def order_key(order: Order) -> str:
    """Its key in `ActorView.busy`."""
    match order:
        case LoadVersion() | DropVersion():
            return load_key(order.version)
        case PushPlan():
            return plan_key(order.plan)
        case HoldLayouts():
            return LAYOUTS_KEY
        case _:
            assert_never(order)


async def give_order(cluster: ActorCluster, supervisor: Supervisor, order: Order) -> Change:
    """Ask, and wait for the answer.

    Raises:
        PeerLostError, DeadlineError: the actor is dead or silent.
        SupernodeError: the world has changed meanwhile: decide again.
        K3RayError: what the actor raised.
    """
    life = order.incarnation
    match order:
        case LoadVersion():
            version = order.version
            await cluster.order(life, "load_version", version)
            return lambda view: replace(view, versions=view.versions | {version}, num_failures=0)
        case DropVersion():
            gone = order.version
            await cluster.order(life, "drop_version", gone)
            return lambda view: replace(view, versions=view.versions - {gone})
        case PushPlan():
            plan = supervisor.plan()
            if plan is None:
                raise SupernodeError("there is no plan to push", remedy="decide again")
            await cluster.order(life, "set_plan", plan)
            return lambda view: replace(view, plan=plan.version)
        case HoldLayouts():
            layouts, shares = order.layouts, supervisor.shares_of(life.actor)
            if shares.keys() != layouts:
                raise SupernodeError("the live layouts have changed", remedy="decide again")
            await cluster.order(life, "hold_layouts", shares)
            return lambda view: replace(view, layouts=layouts)
        case _:
            assert_never(order)
