"""`Supervisor`: what the controller knows about its actors, plan, versions and pins. No Ray.

It turns observations into views, keeps facts in the ledger, and refuses observations of lives
that are over. The controller actor asks it for a view, lets `decide` choose, and carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from k3ray.config.model import TextConfig
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.decide import backoff_s
from k3ray.control.ledger import Ledger
from k3ray.control.records import (
    ActorLost,
    ActorReady,
    PeerRecord,
    PlanSwitched,
    Size,
    SupernodeUp,
    TermGranted,
)
from k3ray.control.scale_ledger import ScaleLedger, layout_view
from k3ray.control.version_ledger import VersionLedger
from k3ray.control.view import (
    ActorState,
    ActorView,
    ClusterView,
    group_ids,
)
from k3ray.errors import SupernodeError
from k3ray.ids import Incarnation, Role
from k3ray.placement.layout import GroupShare, MovePlan, first_layout
from k3ray.placement.plan import GroupPeer, PlacementPlan, validate_plan

PINS_SETTLE_S = 15.0
"""Pins do not outlive a controller: so long the ingresses have to say theirs again (they notice at
a heartbeat), and no version is retired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Where a life runs, as it said itself when it was ready."""

    node: str
    pid: int
    process_started_unix_s: float
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a life says that it holds: weight versions; a stack its plan, a group its shares by
    layout."""

    versions: frozenset[str]
    plan: int = 0
    shares: Mapping[int, GroupShare] = field(default_factory=dict)


class Supervisor:
    """See the module. `now_s` arguments are monotonic seconds."""

    def __init__(
        self,
        spec: SupernodeSpec,
        text: TextConfig,
        partition: tuple[tuple[int, ...], ...],
        ledger: Ledger,
        *,
        now_s: float,
    ) -> None:
        first = first_layout(partition, group_ids(spec.groups), spec.replication, text.num_experts)
        self.scaling = ScaleLedger(spec, first, ledger, now_s=now_s)
        self.text = text
        self.ledger = ledger
        self.versions = VersionLedger(ledger, now_s=now_s)
        self._plan: PlacementPlan | None = None
        self._takes_over = ledger.state.up is not None
        self._pins_unknown_until_s = now_s + PINS_SETTLE_S if self._takes_over else now_s
        ledger.write(
            SupernodeUp(name=spec.name, preset=spec.preset, line=spec.line, partition=partition)
        )
        self.actors: dict[str, ActorView] = {}
        self._add_actors(now_s)
        self._add_left_over(now_s)

    @property
    def spec(self) -> SupernodeSpec:
        """What is wanted now."""
        return self.scaling.spec

    def scale(self, size: Size, reason: str, now_s: float) -> MovePlan | None:
        """Want another size from here on; `decide` does the rest.

        Raises:
            ScalingError: another change is under way.
            PlanError: no layout has so many groups.
        """
        moves = self.scaling.begin(size, reason, now_s)
        self._add_actors(now_s)
        return moves

    def roll_back_scale(self, reason: str, now_s: float) -> None:
        """Want the size before the change again."""
        self.scaling.roll_back(reason, now_s)
        self._add_actors(now_s)

    def _add_left_over(self, now_s: float) -> None:
        """Know lives of an earlier controller that nothing wants any more: they must end."""
        for name, facts in self.ledger.state.actors.items():
            hosts = facts.role in (Role.EXPERT_GROUP, Role.ATTENTION_STACK)
            if hosts and not facts.lost and name not in self.actors:
                self.actors[name] = self._first_view(name, facts.role, now_s)

    def _add_actors(self, now_s: float) -> None:
        """Know the actors that are wanted, and stacks that a change takes away."""
        for name, role in self.scaling.wanted_actors().items():
            if name not in self.actors:
                self.actors[name] = self._first_view(name, role, now_s)

    def forget(self, actor: str) -> None:
        """An actor that the spec no longer has is gone."""
        view = self.actors.get(actor)
        if view is not None and view.state is ActorState.ABSENT:
            del self.actors[actor]

    def _first_view(self, actor: str, role: Role, now_s: float) -> ActorView:
        """Absent, or LOST when the journal has a life whose end was not recorded."""
        facts = self.ledger.state.actors.get(actor)
        if facts is None:
            return ActorView(actor=actor, role=role)
        view = ActorView(actor=actor, role=role, term=facts.term, since_s=now_s)
        if facts.lost:
            return view
        return replace(view, state=ActorState.LOST, note="left over from an earlier controller")

    def adoptable(self) -> tuple[Incarnation, ...]:
        """Lives of an earlier controller that are wanted and were ready."""
        if not self._takes_over:
            return ()
        facts, wanted = self.ledger.state.actors, self.scaling.wanted_actors()
        return tuple(
            view.incarnation
            for name, view in self.actors.items()
            if name in wanted and view.state is ActorState.LOST and facts[name].ready is not None
        )

    def adopt(self, incarnation: Incarnation, holding: Holding, now_s: float) -> None:
        """A life of an earlier controller lives, and holds so much."""
        view, facts = self.actors[incarnation.actor], self.process_of(incarnation.actor)
        if facts is None or view.incarnation != incarnation:
            return
        shares = self.shares_of(view.actor).items()
        self.actors[view.actor] = replace(
            view, state=ActorState.READY, since_s=now_s, note="", node=facts.node, pid=facts.pid,
            endpoint=facts.endpoint, versions=holding.versions, plan=holding.plan,
            layouts=frozenset(n for n, share in shares if holding.shares.get(n) == share),
        )  # fmt: skip

    def take_over_plan(self) -> None:
        """Go on with the journal's plan if a group that it names was adopted."""
        record = self.ledger.state.plan
        if record is None or record.layout != self.scaling.layout.number:
            return
        lives = {
            view.incarnation for view in self.actors.values() if view.state is ActorState.READY
        }
        if any(peer.incarnation in lives for peer in record.peers):
            self._plan = self._make_plan(record)

    def begin_life(self, actor: str, now_s: float) -> Incarnation:
        """Grant the next term; the actor is STARTING from here on."""
        view = self.actors[actor]
        incarnation = Incarnation(actor=actor, term=self.ledger.state.term_of(actor) + 1)
        self.ledger.write(TermGranted(incarnation=incarnation, role=view.role))
        self.actors[actor] = ActorView(
            actor=actor, role=view.role, term=incarnation.term, state=ActorState.STARTING,
            since_s=now_s, num_failures=view.num_failures, note=view.note,
            layouts=frozenset(self.scaling.live_layouts()),
        )  # fmt: skip
        return incarnation

    def observe_ready(self, incarnation: Incarnation, facts: ProcessFacts, now_s: float) -> None:
        """A life came up."""
        view = self._current(incarnation, ActorState.STARTING)
        if view is None:
            return
        record = ActorReady(
            incarnation=incarnation,
            role=view.role,
            node=facts.node,
            pid=facts.pid,
            process_started_unix_s=facts.process_started_unix_s,
            endpoint=facts.endpoint,
        )
        self.ledger.write(record)
        self.actors[view.actor] = replace(
            view, state=ActorState.READY, since_s=now_s, node=facts.node, pid=facts.pid,
            endpoint=facts.endpoint, note="",
        )  # fmt: skip

    def observe_lost(self, incarnation: Incarnation, reason: str, now_s: float) -> bool:
        """A life is over or must end; returns whether that was news."""
        view = self._current(incarnation, ActorState.STARTING, ActorState.READY)
        if view is None:
            return False
        # A life that held a version had come up well: only the others use up the budget.
        failed = not view.versions
        self.actors[view.actor] = replace(
            view, state=ActorState.LOST, since_s=now_s, note=reason, versions=frozenset(),
            busy=frozenset(), plan=0, layouts=frozenset(),
            num_failures=view.num_failures + 1 if failed else 0,
        )  # fmt: skip
        return True

    def begin_fencing(self, incarnation: Incarnation, reason: str, now_s: float) -> bool:
        """Fencing is under way; False when that life is no longer current."""
        self.observe_lost(incarnation, reason, now_s)
        view = self._current(incarnation, ActorState.LOST)
        if view is None:
            return False
        self.actors[view.actor] = replace(view, state=ActorState.FENCING, since_s=now_s)
        return True

    def observe_fenced(self, incarnation: Incarnation, now_s: float) -> None:
        """The process is certainly gone: its replacement may allocate."""
        view = self._current(incarnation, ActorState.FENCING)
        if view is None:
            return
        self.ledger.write(ActorLost(incarnation=incarnation, reason=view.note))
        self.actors[view.actor] = replace(
            view, state=ActorState.ABSENT, since_s=now_s, pid=0, endpoint="",
            retry_at_s=now_s + backoff_s(view.num_failures),
        )  # fmt: skip

    def fencing_failed(self, incarnation: Incarnation, reason: str, now_s: float) -> None:
        """Try again: the process may still live."""
        view = self._current(incarnation, ActorState.FENCING)
        if view is not None:
            self.actors[view.actor] = replace(
                view, state=ActorState.LOST, since_s=now_s, note=reason
            )

    def begin(self, incarnation: Incarnation, key: str) -> bool:
        """Mark an operation as under way; False when that life is over."""
        view = self._current(incarnation, ActorState.READY)
        if view is None:
            return False
        self.actors[view.actor] = replace(view, busy=view.busy | {key})
        return True

    def finish(
        self,
        incarnation: Incarnation,
        key: str,
        change: Callable[[ActorView], ActorView],
    ) -> None:
        """An operation succeeded; `change` puts its result into the view."""
        view = self._current(incarnation, ActorState.READY)
        if view is not None:
            self.actors[view.actor] = replace(
                change(view), busy=view.busy - {key}, num_op_failures=0, retry_at_s=0.0, note=""
            )

    def fail(self, incarnation: Incarnation, key: str, reason: str, now_s: float) -> None:
        """An operation failed: it is tried again after a pause."""
        view = self._current(incarnation, ActorState.READY)
        if view is not None:
            failures = view.num_op_failures + 1
            self.actors[view.actor] = replace(
                view, busy=view.busy - {key}, num_op_failures=failures, note=reason,
                retry_at_s=now_s + backoff_s(failures),
            )  # fmt: skip

    def process_of(self, actor: str) -> ProcessFacts | None:
        """Where the current life of `actor` runs; None before it said so."""
        known = self.ledger.state.actors.get(actor)
        if known is None or known.ready is None:
            return None
        ready = known.ready
        return ProcessFacts(
            node=ready.node, pid=ready.pid, endpoint=ready.endpoint,
            process_started_unix_s=ready.process_started_unix_s,
        )  # fmt: skip

    def is_ready(self, incarnation: Incarnation) -> bool:
        """Whether that very life is ready."""
        return self._current(incarnation, ActorState.READY) is not None

    def share_of(self, group: str) -> GroupShare:
        """What `group` holds by the current layout (nothing for others)."""
        return self.scaling.layout.share(group, self.text)

    def shares_of(self, group: str) -> dict[int, GroupShare]:
        """What `group` holds by each live layout."""
        layouts = self.scaling.live_layouts()
        return {number: layout.share(group, self.text) for number, layout in layouts.items()}

    def group_terms(self) -> dict[str, int]:
        """Term of every group's current life, 0 where none is ready."""
        return {
            name: self.actors[name].term if self.actors[name].state is ActorState.READY else 0
            for name in self.scaling.layout.groups
        }

    def is_whole(self) -> bool:
        """Whether every group is ready in the life that the current plan names."""
        plan = self.plan()
        return plan is not None and self.group_terms() == {
            group: peer.incarnation.term for group, peer in plan.peers.items()
        }

    def plan(self) -> PlacementPlan | None:
        """The plan that this controller switched to last; None before its first."""
        return self._plan

    def switch_plan(
        self, peers: tuple[Incarnation, ...], number: int, now_s: float
    ) -> PlacementPlan:
        """Make the next plan from the groups' current lives by layout `number`, and record it.

        Raises:
            PlanError: an expert would have no live holder.
            SupernodeError: one of `peers` is not the current, ready life of its group, or the
                layout was forgotten.
        """
        layout = self.scaling.live_layouts().get(number)
        if layout is None:
            raise SupernodeError(f"layout {number} is not live", remedy="decide again")
        views = []
        for peer in peers:
            view = self._current(peer, ActorState.READY)
            if view is None:
                raise SupernodeError(f"{peer} is not ready", remedy="decide again")
            views.append(view)
        before = self.ledger.state.plan
        records = tuple(PeerRecord(incarnation=v.incarnation, endpoint=v.endpoint) for v in views)
        record = PlanSwitched(
            version=(before.version if before else 0) + 1, layout=number, peers=records
        )
        plan = self._make_plan(record)
        validate_plan(plan, self.text)
        self.ledger.write(record)
        self.scaling.switched(number, now_s)
        self._plan = plan
        return plan

    def _make_plan(self, record: PlanSwitched) -> PlacementPlan:
        layout = self.scaling.live_layouts()[record.layout]
        return PlacementPlan(
            version=record.version,
            homes=layout.homes(self.text),
            replicas=layout.replicas(self.text),
            layout=record.layout,
            peers={
                p.incarnation.actor: GroupPeer(incarnation=p.incarnation, endpoint=p.endpoint)
                for p in record.peers
            },
        )

    def view(self) -> ClusterView:
        """Actors, plan, the line's versions and pins (leases are the training ledger's)."""
        plan, scaling = self.plan(), self.scaling
        return ClusterView(
            actors=dict(self.actors),
            layout=layout_view(scaling.layout),
            next_layout=layout_view(scaling.next_layout) if scaling.next_layout else None,
            old_layout=layout_view(scaling.old_layout) if scaling.old_layout else None,
            layout_since_s=scaling.layout_since_s,
            plan=plan.version if plan else 0,
            plan_peers={g: p.incarnation.term for g, p in plan.peers.items()} if plan else {},
            scale=scaling.view(),
            versions=self.versions.views(self.spec.line),
            pins=self.versions.pins(),
            pins_unknown_until_s=self._pins_unknown_until_s,
        )

    def _current(self, incarnation: Incarnation, *states: ActorState) -> ActorView | None:
        view = self.actors.get(incarnation.actor)
        if view is None or view.term != incarnation.term or view.state not in states:
            return None
        return view
