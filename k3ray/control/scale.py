"""Changing the number of attention stacks: new ones start, surplus ones drain and end. Pure.

A stack that the spec no longer has gets no new requests from the moment of the change. It ends when
its open requests have ended, or after `drain_s`; what is still open then goes on on another stack
with the same bits, as after a death. The change is complete when all stacks serve and none is left
over. If a new stack does not come to serve, the old number is restored.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import Command, EndScale, FenceActor, ForgetActor, RollBackScale
from k3ray.control.view import (
    ActorState,
    ActorView,
    ClusterView,
    ScaleView,
    serving_stacks,
    stack_ids,
)
from k3ray.ids import Role

SETTLE_S = 1.0
"""Ingresses know of a change so much later at most: only then is an idle stack surely idle."""

MAX_FAILED_STARTS = 2
"""Failed starts of a new stack after which the change is taken back."""


def surplus_stacks(spec: SupernodeSpec, view: ClusterView) -> list[ActorView]:
    """Stacks that the spec no longer has, by name."""
    wanted = set(stack_ids(spec))
    stacks = (a for a in view.actors.values() if a.role is Role.ATTENTION_STACK)
    return sorted((a for a in stacks if a.actor not in wanted), key=lambda actor: actor.actor)


def scale_commands(spec: SupernodeSpec, view: ClusterView, now_s: float) -> Iterator[Command]:
    """What brings a change of the number of stacks on."""
    scale = view.scale
    if scale is None:
        return
    surplus = surplus_stacks(spec, view)
    for actor in surplus:
        yield from _ending(spec, view, scale, actor, now_s)
    serving = {stack.actor for stack in serving_stacks(spec, view)}
    missing = [name for name in stack_ids(spec) if name not in serving]
    if not missing and not surplus:
        yield EndScale(reason=f"all {scale.target} stacks serve, none is left over")
        return
    failed = _failure(spec, view, scale, missing, now_s)
    if failed and scale.target > scale.previous:
        yield RollBackScale(reason=f"{failed}; back to {scale.previous} stacks")


def _ending(
    spec: SupernodeSpec, view: ClusterView, scale: ScaleView, actor: ActorView, now_s: float
) -> Iterator[Command]:
    waited_s = now_s - scale.since_s
    load = view.loads.get(actor.actor)
    if actor.state is ActorState.ABSENT:
        yield ForgetActor(actor=actor.actor, reason=f"the spec has {spec.stacks} stacks")
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
    """Why the change cannot succeed, if it cannot."""
    new = set(stack_ids(spec)[scale.previous :])
    for name in missing:
        actor = view.actors.get(name)
        if name in new and actor is not None and actor.num_failures >= MAX_FAILED_STARTS:
            return f"{name} failed {actor.num_failures} times ({actor.note})"
    limit_s = spec.deadlines.start_s + spec.deadlines.rebuild_s
    if new & set(missing) and now_s - scale.since_s >= limit_s:
        return f"{', '.join(sorted(new & set(missing)))} did not serve within {limit_s:g} s"
    return None
