"""`ControlLoop`: observe -> `decide` -> carry out, over and over; the heart of the controller.

Decisions are `k3ray.control`'s; here they become Ray calls, one task each, whose results are
observed in turn. Everything runs on one event loop, so state needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, assert_never

import psutil

from k3ray.actors.controller_adoption import adopt_all
from k3ray.actors.controller_clients import ClientRegistry
from k3ray.actors.controller_cluster import (
    ActorCluster,
    is_alive,
    is_stopped,
    open_requests,
    own_node,
)
from k3ray.actors.controller_orders import Order, give_order, order_key
from k3ray.clock import Deadline, monotonic
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
from k3ray.control.supervisor import Supervisor
from k3ray.control.training import TrainingLedger
from k3ray.control.view import ActorState, ClusterView
from k3ray.errors import (
    DeadlineError,
    FencedError,
    K3RayError,
    PeerLostError,
)
from k3ray.ids import Incarnation, Role
from k3ray.weights.store import WeightStore

TICK_S = 0.2
PING_EVERY_S = 2.0
MAX_DECISIONS = 50
_ADOPT_HOPS = 10.0
"""An actor of an earlier controller has so many hops' time to say what it holds."""
_EXIT_FENCED = 71

ActorCommand = StartActor | FenceActor | Order

_log = logging.getLogger(__name__)


class ControlLoop:
    """See the module; `run` is the loop, `notify` wakes it and everybody in `until`."""

    def __init__(
        self,
        supervisor: Supervisor,
        training: TrainingLedger,
        cluster: ActorCluster,
        clients: ClientRegistry,
        store: WeightStore,
    ) -> None:
        self.supervisor = supervisor
        self.training = training
        self.cluster = cluster
        self.clients = clients
        self.decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)
        self.stats: dict[Incarnation, dict[str, Any]] = {}
        self.failure: str | None = None
        self.stopping = False
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulse = asyncio.Event()
        self._stopped_since: dict[Incarnation, float] = {}
        self._last_wait: tuple[str, frozenset[str]] | None = None

    async def run(self) -> None:
        """Take over who lives, then decide and carry out until `stop`; a fenced controller ends
        its process."""
        limit_s = _ADOPT_HOPS * self.supervisor.spec.deadlines.hop_s
        for life in await adopt_all(self.supervisor, self.cluster, limit_s=limit_s):
            self._look_after(life)
        while not self.stopping:
            self._observe()
            for command in decide(self.supervisor.spec, self.view(), monotonic()):
                self._guarded(command)
            try:
                async with asyncio.timeout(TICK_S):
                    await self._pulse.wait()
            except TimeoutError:
                continue

    def view(self) -> ClusterView:
        """The world as it is known now."""
        return replace(
            self.supervisor.view(),
            loads={life.actor: open_requests(stats) for life, stats in self.stats.items()},
            leases=self.training.leases(),
            attempts=self.training.attempts(),
        )

    def notify(self) -> None:
        """Something changed."""
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()

    async def until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until `condition` holds; False at the deadline."""
        while not condition():
            left_s = deadline.left_s()
            if left_s <= 0 or self.stopping:
                return False
            try:
                async with asyncio.timeout(min(left_s, 1.0)):
                    await self._pulse.wait()
            except TimeoutError:
                continue
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the loop; an unforeseen error fails the supernode visibly."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def lost(self, incarnation: Incarnation, reason: str) -> None:
        """Observe the end of a life."""
        if self.supervisor.observe_lost(incarnation, reason, monotonic()):
            _log.warning("event=actor.lost incarnation=%s reason=%r", incarnation, reason)
            self.stats.pop(incarnation, None)
            self.notify()

    async def verify(self, incarnation: Incarnation) -> bool:
        """Whether a reported death is true; if so it is acted upon."""
        view = self.supervisor.actors.get(incarnation.actor)
        if view is None or view.term != incarnation.term or view.state is not ActorState.READY:
            return True
        facts = self.supervisor.process_of(view.actor)
        if facts is not None and facts.node == own_node():
            if not is_alive(facts):
                self.lost(incarnation, "its process is gone")
                return True
            if is_stopped(facts):
                self.lost(incarnation, "its process is stopped")
                return True
        return not await self._answers(incarnation, 10 * self.supervisor.spec.deadlines.hop_s)

    async def stop(self) -> None:
        """End the loop and its tasks."""
        self.stopping = True
        self.notify()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _guarded(self, command: Command) -> None:
        try:
            self.record(command)
            self._carry_out(command)
        except FencedError as error:
            _log.critical("event=controller.fenced %s", error)
            logging.shutdown()
            os._exit(_EXIT_FENCED)
        except K3RayError as error:
            self.failure = str(error)
            _log.error("event=controller.command_failed command=%s error=%s", command, error)

    def record(self, command: Command) -> None:
        """Put a decision into the log; a wait that only repeats itself is left out."""
        if isinstance(command, WaitForPins):
            waits_for = frozenset(pin.request_id for pin in command.pins)
            if self._last_wait == (command.line, waits_for):
                return
            self._last_wait = (command.line, waits_for)
        fields = {
            name: str(getattr(command, name))
            for name in command.__slots__
            if name not in ("reason", "pins")
        }
        entry = {
            "time": time.time(),
            "command": type(command).__name__,
            "reason": command.reason,
            **fields,
        }
        self.decisions.append(entry)
        _log.info("event=decision %s", entry)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, ActorCommand):
            self._order_actor(command)
        else:
            self._change_facts(command)
        self.notify()

    def _order_actor(self, command: ActorCommand) -> None:
        match command:
            case StartActor():
                incarnation = self.supervisor.begin_life(command.actor, monotonic())
                self.spawn(self._start(incarnation, command.role))
            case FenceActor():
                reason = command.reason
                if self.supervisor.begin_fencing(command.incarnation, reason, monotonic()):
                    self.spawn(self._fence(command.incarnation))
            case LoadVersion() | DropVersion() | PushPlan() | HoldLayouts():
                self._operate(command)
            case _:
                assert_never(command)

    def _change_facts(
        self,
        command: SwitchPlan
        | ActivateVersion
        | RetireVersion
        | ExpireLease
        | ExpirePin
        | AbortAttempt
        | WaitForPins
        | ForgetActor
        | EndScale
        | RollBackScale
        | RetireLayout,
    ) -> None:
        match command:
            case ForgetActor():
                self.supervisor.forget(command.actor)
            case EndScale():
                self.supervisor.scaling.end(command.reason)
            case RollBackScale():
                self.supervisor.roll_back_scale(command.reason, monotonic())
            case RetireLayout():
                self.supervisor.scaling.retire(command.number)
            case SwitchPlan():
                self.supervisor.switch_plan(command.peers, command.layout, monotonic())
            case ActivateVersion():
                self.supervisor.versions.activate(command.version)
            case RetireVersion():
                self._retire(command)
            case ExpireLease():
                self.training.end(command.lease_id, command.reason)
            case ExpirePin():
                self.supervisor.versions.unpin(command.request_id)
            case AbortAttempt():
                self.training.abort(command.line, command.reason)
            case WaitForPins():
                return
            case _:
                assert_never(command)

    def _retire(self, command: RetireVersion) -> None:
        facts = self.supervisor.ledger.state.versions[command.version]
        self.supervisor.versions.retire(command.version, command.reason)
        if command.failed and not facts.restored:
            self._store.delete(facts.line, command.version)

    def _operate(self, order: Order) -> None:
        if self.supervisor.begin(order.incarnation, order_key(order)):
            self.spawn(self._operation(order))

    async def _operation(self, order: Order) -> None:
        life, key = order.incarnation, order_key(order)
        try:
            change = await give_order(self.cluster, self.supervisor, order)
        except K3RayError as error:
            _log.warning("event=operation.failed peer=%s key=%r %s", life, key, error)
            self.supervisor.fail(life, key, str(error), monotonic())
        else:
            self.supervisor.finish(life, key, change)
        self.notify()

    async def _start(self, incarnation: Incarnation, role: Role) -> None:
        shares = self.supervisor.shares_of(incarnation.actor)
        try:
            facts = await self.cluster.start(incarnation, role, shares)
        except K3RayError as error:
            self.lost(incarnation, f"did not start: {error.message}")
            return
        self.supervisor.observe_ready(incarnation, facts, monotonic())
        self._look_after(incarnation)
        self.notify()

    def _look_after(self, incarnation: Incarnation) -> None:
        self.spawn(self._watch(incarnation))
        self.spawn(self._ping(incarnation))

    async def _fence(self, incarnation: Incarnation) -> None:
        limit_s = self.supervisor.spec.deadlines.commit_s
        try:
            await self.cluster.fence(
                incarnation, self.supervisor.process_of(incarnation.actor), limit_s=limit_s
            )
        except K3RayError as error:
            self.supervisor.fencing_failed(incarnation, str(error), monotonic())
        else:
            self.supervisor.observe_fenced(incarnation, monotonic())
        self.notify()

    async def _watch(self, incarnation: Incarnation) -> None:
        self.lost(incarnation, await self.cluster.until_dead(incarnation))

    async def _ping(self, incarnation: Incarnation) -> None:
        limit_s = self.supervisor.spec.deadlines.prepare_s
        while self.supervisor.is_ready(incarnation):
            await self._answers(incarnation, limit_s)
            await asyncio.sleep(PING_EVERY_S)

    async def _answers(self, incarnation: Incarnation, limit_s: float) -> bool:
        view = self.supervisor.actors[incarnation.actor]
        method = "status" if view.role is Role.EXPERT_GROUP else "stats"
        try:
            answer = await self.cluster.call(incarnation, method, limit_s=limit_s)
        except (PeerLostError, DeadlineError) as error:
            self.lost(incarnation, error.message)
            return False
        except K3RayError as error:  # it answers, if with an error
            _log.warning("event=ping.error peer=%s %s", incarnation, error)
            return True
        self.stats[incarnation] = dict(answer)
        return True

    def _observe(self) -> None:
        """Processes of this node, straight from the kernel: gone, or stopped for too long."""
        now_s = monotonic()
        for view in self.supervisor.actors.values():
            facts = (
                self.supervisor.process_of(view.actor) if view.state is ActorState.READY else None
            )
            if facts is None or facts.node != own_node():
                continue
            if not is_alive(facts):
                self.lost(view.incarnation, "its process is gone")
            elif not is_stopped(facts):
                self._stopped_since.pop(view.incarnation, None)
            elif now_s - self._stopped_since.setdefault(view.incarnation, now_s) >= (
                self.supervisor.spec.deadlines.hop_s
            ):
                self.lost(view.incarnation, "its process is stopped")
        for client in self.clients.drop_dead(now_s=now_s):
            self.supervisor.versions.orphan(client.incarnation, now_s)
        for lease in self.supervisor.ledger.state.leases.values():
            if lease.host == socket.gethostname() and not psutil.pid_exists(lease.pid):
                self.training.holder_gone(lease.lease_id)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, FencedError):
                os._exit(_EXIT_FENCED)
            self.failure = f"{type(error).__name__}: {error}"
            _log.error("event=controller.task_failed", exc_info=error)
            self.notify()
