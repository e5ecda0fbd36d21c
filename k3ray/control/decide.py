"""`decide(spec, view, now)`: what to do next, as ordered commands with reasons. Pure.

Level-triggered: it looks only at how things are, so it gives the same answer however they came to
be, after a restart too. Idempotent: what is under way (`STARTING`, `busy`) is not ordered again.
Order: endings, fencing, starts, loads, plan, versions, drops, layouts, scaling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import (
    AbortAttempt,
    ActivateVersion,
    Command,
    DropVersion,
    ExpireLease,
    ExpirePin,
    FenceActor,
    LoadVersion,
    PushPlan,
    RetireVersion,
    StartActor,
    SwitchPlan,
    load_key,
    plan_key,
)
from k3ray.control.layouts import layout_commands
from k3ray.control.scale import scale_commands
from k3ray.control.versions import pins_in_the_way, pins_of, retirable
from k3ray.control.view import (
    ActorState,
    ActorView,
    ClusterView,
    LayoutView,
    PinView,
    VersionView,
    stack_ids,
    wanted_groups,
)
from k3ray.ids import Role

RESTART_BUDGET = 6
"""Failed starts in a row after which an actor is given up (said in the status)."""


def decide(spec: SupernodeSpec, view: ClusterView, now_s: float) -> tuple[Command, ...]:
    """The commands that bring `view` closer to `spec`; empty when there is nothing to do."""
    return (
        *_endings(spec, view, now_s),
        *_fences(spec, view, now_s),
        *_starts(spec, view, now_s),
        *_loads(spec, view, now_s),
        *_plan(spec, view, now_s),
        *_versions(spec, view, now_s),
        *_drops(spec, view),
        *layout_commands(view, now_s),
        *scale_commands(spec, view, now_s),
    )


def backoff_s(num_failures: int) -> float:
    """Pause before the next try after `num_failures` in a row, at most 30 s."""
    return 0.0 if num_failures == 0 else min(30.0, 0.25 * 2.0**num_failures)


def given_up(actor: ActorView) -> bool:
    """Whether an actor used up its restart budget."""
    return actor.state is ActorState.ABSENT and actor.num_failures >= RESTART_BUDGET


def _endings(spec: SupernodeSpec, view: ClusterView, now_s: float) -> Iterator[Command]:
    for lease in view.leases:
        if lease.holder_gone or now_s >= lease.deadline_s:
            why = "its process is gone" if lease.holder_gone else "it was not renewed in time"
            yield ExpireLease(
                lease_id=lease.lease_id, line=lease.line, reason=f"job {lease.job!r}: {why}"
            )
    for pin in view.pins:
        ending = _end_of_pin(spec, pin, now_s)
        if ending is not None:
            yield ExpirePin(request_id=pin.request_id, version=pin.version, reason=ending)
    expiring = {
        lease.line for lease in view.leases if lease.holder_gone or now_s >= lease.deadline_s
    }
    missing = [g for g in view.layout.groups if not _serves_in_plan(view, g)]
    for attempt in view.attempts:
        if attempt.line in expiring:
            continue  # ends with its lease
        if attempt.plan != view.plan or missing:
            why = f"{missing[0]} was lost" if missing else f"plan is now {view.plan}"
            yield AbortAttempt(
                line=attempt.line, step=attempt.step, attempt=attempt.attempt,
                reason=f"began under plan {attempt.plan}, {why}",
            )  # fmt: skip


def _end_of_pin(spec: SupernodeSpec, pin: PinView, now_s: float) -> str | None:
    """Why a pin ends now; None while it lasts."""
    age_s = now_s - pin.since_s
    if age_s >= spec.max_pin_age_s:
        return f"pinned for {age_s:.0f} s (max {spec.max_pin_age_s:g})"
    if pin.orphan_since_s is None:
        return None
    alone_s = now_s - pin.orphan_since_s
    late = alone_s >= spec.engine.orphan_timeout_s
    return f"{pin.holder} ended {alone_s:.0f} s ago" if late else None


def _serves_in_plan(view: ClusterView, group: str) -> bool:
    actor = view.actors.get(group)
    return (
        actor is not None
        and actor.state is ActorState.READY
        and view.plan_peers.get(group) == actor.term
    )


def _fences(spec: SupernodeSpec, view: ClusterView, now_s: float) -> Iterator[Command]:
    for actor in view.actors.values():
        if actor.state is ActorState.LOST:
            yield FenceActor(incarnation=actor.incarnation, reason=actor.note or "lost")
        elif actor.state is ActorState.STARTING and now_s - actor.since_s >= spec.deadlines.start_s:
            yield FenceActor(
                incarnation=actor.incarnation,
                reason=f"not ready within start_s = {spec.deadlines.start_s:g} s",
            )


def _starts(spec: SupernodeSpec, view: ClusterView, now_s: float) -> Iterator[Command]:
    wanted = [(actor, Role.EXPERT_GROUP) for actor in wanted_groups(view)]
    wanted += [(actor, Role.ATTENTION_STACK) for actor in stack_ids(spec)]
    for name, role in wanted:
        actor = view.actors.get(name, ActorView(actor=name, role=role))
        if actor.state is not ActorState.ABSENT or given_up(actor) or now_s < actor.retry_at_s:
            continue
        why = "the spec asks for it" if actor.term == 0 else f"replaces term {actor.term}"
        if actor.num_failures:
            why += f", try {actor.num_failures + 1} of {RESTART_BUDGET} ({actor.note})"
        yield StartActor(actor=name, role=role, reason=why)


def _loads(spec: SupernodeSpec, view: ClusterView, now_s: float) -> Iterator[Command]:
    # Active versions first: a rebuilt group must serve before it takes part in an activation.
    ordered = sorted((v for v in view.versions if v.active), key=lambda v: (not v.latest, -v.step))
    ordered += _activating(view)
    for actor in _holders(spec, view):
        if actor.state is not ActorState.READY or now_s < actor.retry_at_s:
            continue
        for version in ordered:
            if version.version in actor.versions or load_key(version.version) in actor.busy:
                continue
            why = "live" if version.active else "to be activated"
            yield LoadVersion(
                incarnation=actor.incarnation, version=version.version, reason=f"version is {why}"
            )


def _holders(spec: SupernodeSpec, view: ClusterView) -> list[ActorView]:
    ids = (*wanted_groups(view), *stack_ids(spec))
    return [view.actors[name] for name in ids if name in view.actors]


def _plan(spec: SupernodeSpec, view: ClusterView, now_s: float) -> Iterator[Command]:
    needed = _serving_versions(view)
    for layout in (view.next_layout, view.layout):
        if layout is None:
            continue
        whole = _whole_groups(view, layout, needed)
        if needed and _may_switch(view, layout, {g.actor: g.term for g in whole}):
            yield SwitchPlan(
                peers=tuple(g.incarnation for g in whole),
                layout=layout.number,
                reason=f"every expert of {len(needed)} live version(s) has a live slot "
                f"({_difference(view, whole)})",
            )
            return  # stacks get it at the next look, when it has its version
    if view.plan == 0:
        return
    for stack in view.actors.values():  # draining ones, too: their requests are still open
        if (
            stack.role is Role.ATTENTION_STACK
            and stack.state is ActorState.READY
            and stack.plan < view.plan
            and plan_key(view.plan) not in stack.busy
            and now_s >= stack.retry_at_s
        ):
            yield PushPlan(
                incarnation=stack.incarnation, plan=view.plan,
                reason=f"it has plan {stack.plan}",
            )  # fmt: skip


def _whole_groups(view: ClusterView, layout: LayoutView, needed: frozenset[str]) -> list[ActorView]:
    """Groups of a layout that hold their share of it in every version needed."""
    groups = (view.actors.get(name) for name in layout.groups)
    return [
        g
        for g in groups
        if g is not None
        and g.state is ActorState.READY
        and needed <= g.versions
        and layout.number in g.layouts
    ]


def _may_switch(view: ClusterView, layout: LayoutView, whole: Mapping[str, int]) -> bool:
    """Whether groups `whole` (with their terms) make a plan, another than the current one."""
    if view.plan == 0 or layout is view.next_layout:
        # A layout begins with all of its groups: at first they come up together, and later the one
        # before serves meanwhile.
        return len(whole) == len(layout.groups)
    if whole == view.plan_peers:
        return False
    return all(not holders.isdisjoint(whole) for holders in layout.holder_sets)


def _difference(view: ClusterView, whole: Sequence[ActorView]) -> str:
    gone = sorted(set(view.plan_peers) - {g.actor for g in whole})
    changed = [g.actor for g in whole if view.plan_peers.get(g.actor) != g.term]
    facts = [f"{word}: {', '.join(n)}" for word, n in (("new", changed), ("gone", gone)) if n]
    return "; ".join(facts) or "another layout"


def _serving_versions(view: ClusterView) -> frozenset[str]:
    """Versions that a group must hold to serve: the active ones, or the very first one."""
    active = frozenset(v.version for v in view.versions if v.active)
    return active or frozenset(v.version for v in _activating(view))


def _versions(spec: SupernodeSpec, view: ClusterView, now_s: float) -> Iterator[Command]:
    ending = retirable(view, now_s)
    if not ending:  # memory holds one version more than may live, not two
        for version in _activating(view):
            yield from _activation(spec, view, version, now_s)
    for version in ending:
        yield RetireVersion(
            version=version.version, failed=False, reason="replaced, and no request pins it"
        )


def _activating(view: ClusterView) -> list[VersionView]:
    """The one version that is being activated: the first that is not active yet, or none."""
    waiting = [v for v in view.versions if not v.active]
    return sorted(waiting, key=lambda v: (v.since_s, v.step))[:1]


def _activation(
    spec: SupernodeSpec, view: ClusterView, version: VersionView, now_s: float
) -> Iterator[Command]:
    required = [a for a in _holders(spec, view) if not (
        a.role is Role.ATTENTION_STACK and given_up(a)
    )]  # fmt: skip
    waiting = [
        a.actor
        for a in required
        if a.state is not ActorState.READY or version.version not in a.versions
    ]
    expected = len(wanted_groups(view)) + spec.stacks
    if not waiting and len(_holders(spec, view)) == expected:
        wait = pins_in_the_way(spec, view, version.line, now_s)
        yield wait or ActivateVersion(
            version=version.version, reason=f"all {len(required)} holders acknowledged it"
        )
        return
    first = not any(v.active for v in view.versions)
    # The very first version has nothing to roll back to: it keeps trying.
    if not first and now_s - version.since_s >= spec.deadlines.rebuild_s:
        yield RetireVersion(
            version=version.version,
            failed=True,
            reason=f"{', '.join(waiting)} did not hold it within rebuild_s = "
            f"{spec.deadlines.rebuild_s:g} s; the old version serves on",
        )


def _drops(spec: SupernodeSpec, view: ClusterView) -> Iterator[Command]:
    live = {version.version for version in view.versions}
    for actor in _holders(spec, view):
        if actor.state is not ActorState.READY:
            continue
        for version in sorted(actor.versions - live):
            if load_key(version) not in actor.busy:
                yield DropVersion(
                    incarnation=actor.incarnation, version=version, reason="no longer live"
                )


def describe_pins(view: ClusterView, version: str, now_s: float) -> list[tuple[str, float]]:
    """(request, age in seconds) of the pins on a version, oldest first; for the status."""
    return [(pin.request_id, round(now_s - pin.since_s, 1)) for pin in pins_of(view, version)]
