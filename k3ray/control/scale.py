"""Changing the size: new groups and stacks start, surplus ones end. Pure.

A stack that the spec no longer has gets no new requests from the moment of the change. It ends when
its open requests have ended, or after `drain_s`; what is still open then goes on on another stack
with the same bits, as after a death. Groups change by a new layout (`layouts`); one that is in none
ends. The change is complete when all of the new size serves and nothing is left over. If a new
actor does not come to serve, or a layout is not prepared in time, the old size is restored.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import Command, EndScale, FenceActor, ForgetActor, RollBackScale
from k3ray.control.layouts import SETTLE_S
from k3ray.control.view import (
    ActorState,
    ActorView,
    ClusterView,
    ScaleView,
    serving_stacks,
    stack_ids,
    wanted_groups,
)
from k3ray.ids import Role

MAX_FAILURES = 2
"""Failed starts of a new actor, or failed tries of a group to take its share, after which the
change is taken back."""


def surplus_actors(spec: SupernodeSpec, view: ClusterView) -> list[ActorView]:
    """Stacks that the spec no longer has and groups that no layout has, by name."""
    leaving = view.old_layout.groups if view.old_layout else ()
    wanted = {*stack_ids(spec), *wanted_groups(view), *leaving}
    return sorted(
        (a for a in view.actors.values() if a.actor not in wanted), key=lambda actor: actor.actor
    )


def scale_commands(spec: SupernodeSpec, view: ClusterView, now_s: float) -> Iterator[Command]:
    """What brings a change of the size on."""
    scale = view.scale
    if scale is None:
        return
    surplus = surplus_actors(spec, view)
    for actor in surplus:
        yield from _ending(spec, view, scale, actor, now_s)
    serving = {stack.actor for stack in serving_stacks(spec, view)}
    missing = [name for name in stack_ids(spec) if name not in serving]
    if not missing and not surplus and _settled(view):
        yield EndScale(reason=f"{scale.target} serve, nothing is left over")
        return
    failed = _failure(spec, view, scale, missing, now_s)
    if failed:
        yield RollBackScale(reason=f"{failed}; back to {scale.previous}")


def _settled(view: ClusterView) -> bool:
    """Whether every group holds its share of the one live layout, and nothing else."""
    if view.live_layouts != {view.layout.number}:
        return False
    groups = [view.actors.get(name) for name in view.layout.groups]
    return all(g is not None and g.layouts == view.live_layouts for g in groups)


def _ending(
    spec: SupernodeSpec, view: ClusterView, scale: ScaleView, actor: ActorView, now_s: float
) -> Iterator[Command]:
    waited_s = now_s - scale.since_s
    # A group is left with nothing open: every stack asks by another plan.
    load = view.loads.get(actor.actor) if actor.role is Role.ATTENTION_STACK else 0
    if actor.state is ActorState.ABSENT:
        yield ForgetActor(actor=actor.actor, reason=f"the size is {scale.target}")
    elif actor.state is ActorState.STARTING:
        yield FenceActor(incarnation=actor.incarnation, reason="no longer wanted")
    elif actor.state is ActorState.READY and (
        (load == 0 and waited_s >= SETTLE_S) or waited_s >= spec.deadlines.drain_s
    ):
        left = "it is drained" if load == 0 else f"{load} requests go on elsewhere"
        yield FenceActor(incarnation=actor.incarnation, reason=f"no longer wanted, {left}")


def _failure(
    spec: SupernodeSpec, view: ClusterView, scale: ScaleView, missing: list[str], now_s: float
) -> str | None:
    """Why the change cannot succeed, if it cannot and there is something to take back."""
    coming = set(view.next_layout.groups) - set(view.layout.groups) if view.next_layout else set()
    late = {name for name in missing if name in stack_ids(spec)[scale.previous.stacks :]}
    for name in sorted({*coming, *late}):
        actor = view.actors.get(name)
        if actor is not None and actor.num_failures >= MAX_FAILURES:
            return f"{name} failed {actor.num_failures} times ({actor.note})"
    if view.next_layout is not None:
        for name in view.next_layout.groups:
            actor = view.actors.get(name)
            if actor is not None and actor.num_op_failures >= MAX_FAILURES:
                return f"{name} does not take its share ({actor.note})"
    limit_s = spec.deadlines.start_s + spec.deadlines.rebuild_s
    if now_s - scale.since_s >= limit_s and (late or view.next_layout is not None):
        waiting = sorted(late) or [f"layout {view.next_layout.number}" if view.next_layout else ""]
        return f"{', '.join(waiting)} did not come to serve within {limit_s:g} s"
    return None
