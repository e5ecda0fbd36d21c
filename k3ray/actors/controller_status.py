"""The status document: what `k3ray status --json` prints and the web page shows. JSON-able."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from k3ray.actors.controller_loop import ControlLoop
from k3ray.clock import monotonic
from k3ray.control.decide import describe_pins, given_up
from k3ray.control.view import (
    ActorState,
    ActorView,
    ClusterView,
    latest_version,
    serving_stacks,
    stack_ids,
)
from k3ray.ids import Role

_OUTWARD = {
    ActorState.ABSENT: "waiting",
    ActorState.STARTING: "starting",
    ActorState.READY: "ready",
    ActorState.LOST: "lost",
    ActorState.FENCING: "lost",
}
MAX_PINS_SHOWN = 20


def status_document(
    loop: ControlLoop,
    *,
    model: Mapping[str, str],
    controller: dict[str, Any],
    training: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Everything about the supernode.

    Args:
        loop: The control loop.
        model: Its name (`model`) and the digest of its sizes (`model_digest`).
        controller: The controller's own entry (node, pid, term).
        training: Latest reported metrics by line.
    """
    view = loop.view()
    spec = loop.supervisor.spec
    state, reason = _state(loop, view)
    return {
        "name": spec.name,
        **model,
        "numeric_mode": str(spec.numeric_mode),
        "line": spec.line,
        "state": state,
        "reason": reason,
        "plan_version": view.plan,
        "scaling": _scaling(loop, view),
        "versions": _versions(view),
        "actors": [
            {"role": str(Role.CONTROLLER), "id": "controller", "state": "ready",
             "plan": view.plan, "version": latest_version(view), "experts": {}, **controller},
            *(_actor(loop, view, actor) for actor in view.actors.values()),
            *_clients(loop, view),
        ],
        "leases": [
            {"id": lease.lease_id, "line": lease.line, "job": lease.job, "host": lease.host,
             "pid": lease.pid, "term": lease.term, "granted_unix_s": lease.granted_unix_s}
            for lease in loop.supervisor.ledger.state.leases.values()
        ],
        "decisions": list(loop.decisions),
        "training": _training(loop, training),
    }  # fmt: skip


def _state(loop: ControlLoop, view: ClusterView) -> tuple[str, str]:
    if loop.stopping:
        return "stopping", "stop was called"
    return _failed(loop, view) or _unready(loop, view) or ("ready", "")


def _failed(loop: ControlLoop, view: ClusterView) -> tuple[str, str] | None:
    lost = [a for a in view.actors.values() if given_up(a)]
    groups = [a for a in lost if a.role is Role.EXPERT_GROUP]
    stacks = [a for a in lost if a.role is Role.ATTENTION_STACK]
    if groups or len(stacks) == loop.supervisor.spec.stacks:
        gone = [*groups, *stacks][0]
        return "failed", f"{gone.actor} was given up after {gone.num_failures} tries: {gone.note}"
    return None if loop.failure is None else ("failed", loop.failure)


def _unready(loop: ControlLoop, view: ClusterView) -> tuple[str, str] | None:
    if not latest_version(view):
        return "starting", "the first version is not live yet"
    if not loop.supervisor.is_whole():
        terms = loop.supervisor.group_terms()
        missing = [group for group, term in terms.items() if not term]
        return "rebuilding" if view.plan else "starting", f"waiting for {missing or 'a plan'}"
    waiting = {*stack_ids(loop.supervisor.spec)} - {
        a.actor for a in serving_stacks(loop.supervisor.spec, view)
    }
    if waiting:
        return "rebuilding", f"waiting for {sorted(waiting)}"
    return None


def _scaling(loop: ControlLoop, view: ClusterView) -> dict[str, Any]:
    """The size, and the last change of it: under way, done or taken back (`failure` says why)."""
    spec, last = loop.supervisor.spec, loop.supervisor.scaling.last
    size = {"groups": spec.groups, "stacks": spec.stacks}
    return {
        **size,
        "under_way": view.scale is not None,
        "target": asdict(last.size) if last else size,
        "previous": asdict(last.previous) if last else size,
        "reason": last.reason if last else "",
        "failure": last.failure if last else "",
        "layout": view.layout.number,
        "layouts": sorted(view.live_layouts),
    }


def _versions(view: ClusterView) -> list[dict[str, Any]]:
    now_s = monotonic()
    return [
        {
            "version": v.version,
            "line": v.line,
            "step": v.step,
            "latest": v.latest,
            "active": v.active,
            "pins": len(pins := describe_pins(view, v.version, now_s)),
            "oldest_pins": pins[:MAX_PINS_SHOWN],
        }
        for v in view.versions
    ]


def _actor(loop: ControlLoop, view: ClusterView, actor: ActorView) -> dict[str, Any]:
    group = actor.role is Role.EXPERT_GROUP
    in_plan = view.plan_peers.get(actor.actor) == actor.term
    latest = latest_version(view)
    share = loop.supervisor.share_of(actor.actor)
    plan = (view.plan if in_plan else 0) if group else actor.plan
    return {
        **loop.stats.get(actor.incarnation, {}),
        "role": str(actor.role),
        "id": actor.actor,
        "node": actor.node,
        "pid": actor.pid,
        "term": actor.term,
        "state": _actor_state(actor, latest, serving=in_plan if group else plan == view.plan > 0),
        "plan": plan,
        "version": latest if latest in actor.versions else "",
        "versions": sorted(actor.versions),
        "experts": {str(layer): list(experts) for layer, experts in share.held.items()},
        "home_experts": {str(layer): list(experts) for layer, experts in share.owned.items()},
        "note": actor.note,
    }


def _actor_state(actor: ActorView, latest: str, *, serving: bool) -> str:
    """ "ready" only when it serves: loaded, and part of the plan."""
    if given_up(actor):
        return "failed"
    if actor.state is ActorState.READY and not (serving and latest in actor.versions):
        return "loading"
    return _OUTWARD[actor.state]


def _clients(loop: ControlLoop, view: ClusterView) -> list[dict[str, Any]]:
    return [
        {"role": str(client.role), "id": client.incarnation.actor, "node": client.process.node,
         "pid": client.process.pid, "term": client.incarnation.term, "state": "ready",
         "plan": view.plan, "version": latest_version(view), "endpoint": client.process.endpoint,
         "experts": {}}
        for client in loop.clients.all()
    ]  # fmt: skip


def _training(loop: ControlLoop, metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    state = loop.supervisor.ledger.state
    lines = {*metrics, *state.steps, *state.attempts}
    attempts = Counter({line: begun.attempt for line, begun in state.attempts.items()})
    return {
        line: {
            **metrics.get(line, {}),
            "committed_step": state.steps[line].step if line in state.steps else 0,
            "open_attempt": attempts[line],
            "checkpoint": state.checkpoints[line].entry if line in state.checkpoints else "",
        }
        for line in sorted(lines)
    }
