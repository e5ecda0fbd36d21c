"""A cluster of values: carries out the commands of `decide` on a real `Supervisor`, no Ray.

Faults are told to it (which start or load fails, who dies); time is a number that the test moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from k3ray.actors.controller_orders import Order, order_key
from k3ray.config.presets import PRESETS
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import (
    AbortAttempt,
    ActivateVersion,
    Command,
    DropVersion,
    EndScale,
    ExpireLease,
    ExpirePin,
    FenceActor,
    ForgetActor,
    HoldLayouts,
    LoadVersion,
    PushPlan,
    RetireLayout,
    RetireVersion,
    RollBackScale,
    StartActor,
    SwitchPlan,
    WaitForPins,
)
from k3ray.control.decide import decide
from k3ray.control.journal import Journal
from k3ray.control.ledger import Ledger
from k3ray.control.supervisor import ProcessFacts, Supervisor
from k3ray.control.training import TrainingLedger
from k3ray.control.view import ActorState, ClusterView
from k3ray.ids import Incarnation
from k3ray.placement.layout import partition_of
from k3ray.placement.plan import validate_plan
from k3ray.weights.version import WeightVersion

TEXT = PRESETS["k3-tiny"].text_config


def version_of(step: int) -> WeightVersion:
    """A version of line "main"."""
    return WeightVersion(line="main", step=step, digest=f"{step:012x}")


@dataclass
class FakeCluster:
    """One controller's life over a journal."""

    spec: SupernodeSpec
    journal_file: Path
    now_s: float = 0.0
    fails: Callable[[Command], bool] = lambda command: False
    alive: dict[str, int] = field(default_factory=dict)
    ordered: list[Command] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = Ledger(Journal.open(self.journal_file))
        partition = partition_of(self.spec, TEXT.num_experts)
        self.supervisor = Supervisor(self.spec, TEXT, partition, self.ledger, now_s=self.now_s)
        self.training = TrainingLedger(self.ledger, ttl_s=self.spec.lease_ttl_s, now_s=self.now_s)

    def view(self) -> ClusterView:
        """The world."""
        return replace(
            self.supervisor.view(),
            loads=dict(self.loads),
            leases=self.training.leases(),
            attempts=self.training.attempts(),
        )

    def decide(self) -> tuple[Command, ...]:
        """What `decide` orders now; asked twice, because it must not depend on anything else."""
        view = self.view()
        spec = self.supervisor.spec
        commands = decide(spec, view, self.now_s)
        assert commands == decide(spec, view, self.now_s)
        return commands

    def tick(self) -> int:
        """Decide and carry out everything; returns how many real commands there were."""
        commands = [c for c in self.decide() if not isinstance(c, WaitForPins)]
        for command in commands:
            self.ordered.append(command)
            self.carry_out(command)
            self.check()
        return len(commands)

    def settle(self, *, rounds: int = 60) -> None:
        """Tick until nothing is ordered; time moves past every back-off."""
        quiet = 0
        for _ in range(rounds):
            quiet = 0 if self.tick() else quiet + 1
            if quiet == 2:
                return
            self.now_s += 31.0 if quiet else 0.1
        raise AssertionError(f"no convergence; last orders {self.ordered[-6:]}")

    def kill(self, actor: str) -> None:
        """The process of `actor` dies; the controller sees it."""
        view = self.supervisor.actors[actor]
        self.alive.pop(actor, None)
        self.supervisor.observe_lost(view.incarnation, "killed by the test", self.now_s)

    def carry_out(self, command: Command) -> None:
        """Do it at once, or fail it."""
        boss, failed = self.supervisor, self.fails(command)
        match command:
            case StartActor():
                assert command.actor not in self.alive, "started before its fence"
                life = boss.begin_life(command.actor, self.now_s)
                self.alive[command.actor] = life.term
                if failed:
                    boss.observe_lost(life, "start failed", self.now_s)
                else:
                    boss.observe_ready(life, facts_of(life), self.now_s)
            case FenceActor():
                assert boss.begin_fencing(command.incarnation, command.reason, self.now_s)
                if failed:
                    boss.fencing_failed(command.incarnation, "still there", self.now_s)
                else:
                    self.alive.pop(command.incarnation.actor, None)
                    boss.observe_fenced(command.incarnation, self.now_s)
            case LoadVersion() | DropVersion() | PushPlan() | HoldLayouts():
                self._operate(command, failed)
            case SwitchPlan():
                boss.switch_plan(command.peers, command.layout, self.now_s)
            case ActivateVersion():
                boss.versions.activate(command.version)
            case RetireVersion():
                boss.versions.retire(command.version, command.reason)
            case ForgetActor():
                boss.forget(command.actor)
            case EndScale():
                boss.scaling.end(command.reason)
            case RollBackScale():
                boss.roll_back_scale(command.reason, self.now_s)
            case RetireLayout():
                boss.scaling.retire(command.number)
            case ExpireLease():
                self.training.end(command.lease_id, command.reason)
            case ExpirePin():
                boss.versions.unpin(command.request_id)
            case AbortAttempt():
                self.training.abort(command.line, command.reason)

    def _operate(self, command: Order, failed: bool) -> None:
        boss, life = self.supervisor, command.incarnation
        key = order_key(command)
        if not boss.begin(life, key):
            return
        if failed:
            boss.fail(life, key, "operation failed", self.now_s)
        elif isinstance(command, HoldLayouts):
            boss.finish(life, key, lambda view: replace(view, layouts=command.layouts))
        elif isinstance(command, PushPlan):
            boss.finish(life, key, lambda view: replace(view, plan=command.plan))
        elif isinstance(command, LoadVersion):
            boss.finish(
                life, key, lambda view: replace(view, versions=view.versions | {command.version})
            )
        else:
            boss.finish(
                life, key, lambda view: replace(view, versions=view.versions - {command.version})
            )

    def check(self) -> None:
        """What must hold at every moment."""
        plan = self.supervisor.plan()
        if plan is not None:
            validate_plan(plan, TEXT)
            for group, peer in plan.peers.items():
                assert peer.incarnation.term <= self.ledger.state.term_of(group)
        view = self.view()
        assert sum(v.active for v in view.versions) <= self.spec.max_live_versions + 1
        latest = self.ledger.state.latest.get("main")
        assert latest is None or latest in self.ledger.state.versions
        live = {v.version for v in view.versions}
        assert all(pin.version in live for pin in view.pins)

    def healthy(self) -> bool:
        """Everything serves: all ready, in the plan, holding exactly the live versions."""
        view = self.view()
        live = {v.version for v in view.versions}
        return all(
            actor.state is ActorState.READY
            and actor.versions == live
            and (view.plan_peers.get(name, actor.term) == actor.term)
            and (not name.startswith("stack") or actor.plan == view.plan)
            and (not name.startswith("group") or actor.layouts == {view.layout.number})
            for name, actor in view.actors.items()
        )


def facts_of(life: Incarnation) -> ProcessFacts:
    """Made-up process facts."""
    return ProcessFacts(
        node="here", pid=1000 + life.term, process_started_unix_s=1.0, endpoint=f"ipc:///{life}"
    )
