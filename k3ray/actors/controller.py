"""`Controller`: the one actor that owns the supernode; a shell around `ControlLoop`.

It holds no tensors and answers quickly: long waits are long polls with a deadline. Its methods are
the control plane of everybody else: ingress, train workers, jobs, the command, the web page.
`create_controller` makes it; `k3ray.control` decides; the journal remembers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from k3ray.actors.controller_boot import first_version, missing_versions
from k3ray.actors.controller_clients import ClientRegistry
from k3ray.actors.controller_cluster import (
    ACTOR_ENVIRONMENT,
    ActorCluster,
    Folders,
    open_requests,
    own_node,
    process_started,
)
from k3ray.actors.controller_loop import ControlLoop
from k3ray.actors.controller_status import status_document
from k3ray.actors.controller_training import TrainingMethods
from k3ray.actors.names import actor_name
from k3ray.actors.ray_calls import call
from k3ray.actors.specs import CONTROLLER_NAME, NAMESPACE
from k3ray.clock import Deadline, monotonic
from k3ray.config.home import Home
from k3ray.config.load import config_digest
from k3ray.config.model import TextConfig
from k3ray.config.resolve import resolve_model
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.journal import Journal
from k3ray.control.ledger import Ledger
from k3ray.control.records import Size, SupernodeDown
from k3ray.control.scale_ledger import of_size
from k3ray.control.supervisor import ProcessFacts, Supervisor
from k3ray.control.training import TrainingLedger
from k3ray.control.view import serving_stacks
from k3ray.errors import ConfigError, K3RayError, StaleVersionError, SupernodeError
from k3ray.ids import Incarnation, Role
from k3ray.placement.fits import check_resources
from k3ray.placement.layout import partition_of
from k3ray.placement.plan import PlacementPlan
from k3ray.weights.store import WeightStore

MAX_LONG_POLL_S = 60.0
NUM_CHECKPOINTS_KEPT = 2
MAX_RESTARTS = 20
"""Lives that Ray may give the controller after its first; the journal carries it over."""

_EXIT_FAILED = 70
_LAST_WORDS_S = 5.0
"""A failed beginning stays up so long that its creator can ask why."""

_log = logging.getLogger(__name__)


class ControllerCore(TrainingMethods):
    """All of the controller's methods; `Controller` is this class as a Ray actor."""

    def __init__(self, spec: SupernodeSpec, folders: Folders) -> None:
        text = resolve_model(spec).text_config
        partition = partition_of(spec, text.num_experts)
        folders.journal_file.parent.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(Journal.open(folders.journal_file))
        if ledger.journal.torn is not None:
            _log.warning("event=journal.torn_tail_cut %s", ledger.journal.torn)
        now_s = monotonic()
        self._spec = spec
        self._text: TextConfig = text
        self._model_digest = config_digest(text)
        self._store = WeightStore(folders.store_dir)
        self._ledger = ledger
        self._supervisor = Supervisor(spec, text, partition, ledger, now_s=now_s)
        self._training = TrainingLedger(ledger, ttl_s=spec.lease_ttl_s, now_s=now_s)
        self._cluster = ActorCluster(spec, text, folders, term=ledger.term)
        self._clients = ClientRegistry(
            ledger, silence_s=spec.lease_ttl_s, stopped_s=spec.deadlines.hop_s
        )
        self._metrics: dict[str, dict[str, Any]] = {}
        self._loop: ControlLoop | None = None
        self._runner: asyncio.Task[None] | None = None

    async def begin(self) -> int:
        """Start deciding; returns the controller's term. Any other question begins it, too."""
        if self._loop is None:
            self._begin()
        return self._ledger.term

    @property
    def _running(self) -> ControlLoop:
        """The control loop, begun by the first who needs it."""
        return self._loop or self._begin()

    def _begin(self) -> ControlLoop:
        loop = ControlLoop(
            self._supervisor, self._training, self._cluster, self._clients, self._store
        )
        for version, reason in missing_versions(self._spec, self._store, self._ledger).items():
            self._supervisor.versions.retire(version, reason)
        loop.spawn(self._boot(loop))
        self._runner = asyncio.get_running_loop().create_task(loop.run())
        self._runner.add_done_callback(_end_with_the_loop)
        self._loop = loop
        return loop

    async def _boot(self, loop: ControlLoop) -> None:
        try:
            version = await asyncio.to_thread(
                first_version, self._spec, self._text, self._store, self._ledger
            )
            self._supervisor.versions.commit(version, monotonic())
        except K3RayError as error:
            loop.failure = str(error)
        loop.notify()

    async def status(self) -> dict[str, Any]:
        """What `k3ray status --json` prints; see `status_document`."""
        own = {"node": own_node(), "pid": os.getpid(), "term": self._ledger.term}
        model = {"model": self._spec.model_name, "model_digest": self._model_digest}
        return status_document(self._running, model=model, controller=own, training=self._metrics)

    async def spec(self) -> SupernodeSpec:
        """The spec that the supernode was brought up with."""
        return self._spec

    async def process(self) -> ProcessFacts:
        """The controller's own process, for those who watch it."""
        return ProcessFacts(
            node=own_node(), pid=os.getpid(), endpoint="",
            process_started_unix_s=process_started(os.getpid()),
        )  # fmt: skip

    async def plan(self) -> PlacementPlan:
        """The current plan.

        Raises:
            StaleVersionError: there is none yet.
        """
        plan = self._supervisor.plan()
        if plan is None:
            raise StaleVersionError(
                "no placement plan yet", remedy="wait until the supernode is ready"
            )
        return plan

    async def wait_plan(self, than: int, wait_s: float) -> PlacementPlan | None:
        """The first plan with a version above `than`; None when none came within `wait_s`."""
        deadline = Deadline.after(
            min(wait_s, MAX_LONG_POLL_S), operation="wait_plan", peer=CONTROLLER_NAME
        )

        def newer() -> bool:
            plan = self._supervisor.plan()
            return plan is not None and plan.version > than

        return self._supervisor.plan() if await self._running.until(newer, deadline) else None

    async def register(
        self, role: str, actor_id: str, pid: int, node: str, endpoint: str
    ) -> Incarnation:
        """A client process (ingress, train worker) comes to life; returns its incarnation."""
        clients, now_s = self._running.clients, monotonic()
        before = clients.find(actor_id)
        life = clients.register(Role(role), actor_id, (pid, node, endpoint), now_s=now_s)
        if before is not None:
            self._supervisor.versions.orphan(before, now_s)
        return life

    async def heartbeat(self, incarnation: Incarnation) -> None:
        """A registered client lives.

        Raises:
            FencedError: it was replaced or dropped.
        """
        self._running.clients.heartbeat(incarnation, now_s=monotonic())

    async def stacks(self) -> list[dict[str, Any]]:
        """Stacks that serve the latest version: id, term, actor_name, load (open requests)."""
        return [
            {
                "id": stack.actor,
                "term": stack.term,
                "actor_name": actor_name(stack.incarnation),
                "load": open_requests(self._running.stats.get(stack.incarnation, {})),
            }
            for stack in serving_stacks(self._supervisor.spec, self._running.view())
        ]

    async def scale(self, groups: int | None, stacks: int | None) -> dict[str, Any]:
        """Have another number of expert groups or attention stacks (None: as many as now); requests
        go on meanwhile. Returns at once: the status says how far it is (`scaling`).

        Raises:
            ConfigError: below 1.
            PlacementError: the cluster cannot hold them; carries the arithmetic.
            PlanError: more groups than experts, or fewer than copies of each.
            ScalingError: another change is under way.
            SupernodeError: it does not serve yet.
        """
        spec = self._supervisor.spec
        before = Size(groups=spec.groups, stacks=spec.stacks)
        size = Size(
            groups=before.groups if groups is None else groups,
            stacks=before.stacks if stacks is None else stacks,
        )
        if min(size.groups, size.stacks) < 1:
            raise ConfigError(
                f"{size}: nobody would serve", remedy="ask for 1 of each at least",
                violations=("groups" if size.groups < 1 else "stacks",),
            )  # fmt: skip
        if self._supervisor.plan() is None:
            raise SupernodeError("it does not serve yet", remedy="wait until it is ready")
        moves = None
        if size != before or self._supervisor.scaling.view() is not None:
            wanted = of_size(spec, size)
            check_resources(wanted, self._text, await asyncio.to_thread(_cluster_resources))
            moves = self._supervisor.scale(size, "asked for", monotonic())
            self._running.notify()
        return {
            "size": asdict(size),
            "previous": asdict(before),
            "loads": len(moves.loads) if moves else 0,
            "new_homes": len(moves.new_homes) if moves else 0,
        }

    async def report_lost(self, incarnation: Incarnation, by: str) -> bool:
        """A peer saw a death; the controller looks for itself. Returns whether it is true."""
        _log.info("event=peer.reported_lost incarnation=%s by=%s", incarnation, by)
        return await self._running.verify(incarnation)

    async def stop(self) -> None:
        """End all actors and journal the end; `k3ray down` does the rest."""
        if self._loop is not None:
            await self._loop.stop()
        for lease in list(self._ledger.state.leases):
            self._training.end(lease, "the supernode was stopped")
        await asyncio.gather(*(self._end(actor) for actor in list(self._supervisor.actors)))
        self._ledger.write(SupernodeDown(reason="stop was called"))

    async def _end(self, actor: str) -> None:
        incarnation = self._supervisor.actors[actor].incarnation
        why = "the supernode was stopped"
        if not self._supervisor.begin_fencing(incarnation, why, monotonic()):
            return
        try:
            await self._cluster.fence(
                incarnation,
                self._supervisor.process_of(actor),
                limit_s=self._spec.deadlines.commit_s,
            )
        except K3RayError as error:
            _log.warning("event=stop.fence_failed %s", error)
            return
        self._supervisor.observe_fenced(incarnation, monotonic())


class SelfStartingController(ControllerCore):
    """`ControllerCore` as Ray runs it: every life begins by itself, one that Ray restarted, too.

    That one takes a higher term, fences the actors of the life before and starts new ones;
    requests go on from their known tokens. Ray once lost the call by which a restarted life asks
    itself to begin, so the first question of anybody else begins it as well.
    """

    def __init__(self, spec: SupernodeSpec, folders: Folders) -> None:
        super().__init__(spec, folders)
        ray.get_runtime_context().current_actor.begin.remote()

    def _begin(self) -> ControlLoop:
        """As before, and the end of the process if that fails: Ray tries the next life. The first
        life's creator calls `begin` as well and gets the typed error before that."""
        try:
            return super()._begin()
        except Exception:
            _log.exception("event=controller.begin_failed")
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, _EXIT_FAILED)
            raise


Controller: Any = ray.remote(SelfStartingController)


def create_controller(spec: SupernodeSpec, home: Home) -> Any:
    """Create the detached controller of `home` and let it begin; returns its handle.

    Raises:
        DeadlineError, PeerLostError: it did not come up in time, or died.
        JournalError, PlanError, ConfigError: what its beginning raised.
    """
    folders = Folders(
        store_dir=Path(spec.store_dir) if spec.store_dir else home.store_dir,
        socket_dir=home.socket_dir,
        journal_file=Path(spec.journal_file) if spec.journal_file else home.journal_file,
    )
    handle = Controller.options(
        name=CONTROLLER_NAME, namespace=NAMESPACE, lifetime="detached", num_cpus=0,
        max_restarts=MAX_RESTARTS, max_task_retries=0,
        runtime_env={"env_vars": dict(ACTOR_ENVIRONMENT)},
    ).remote(spec, folders)  # fmt: skip
    call(handle, "begin", peer=CONTROLLER_NAME, limit_s=spec.deadlines.start_s)
    return handle


def _cluster_resources() -> dict[str, float]:
    """Units that all nodes offer (memory is each node's own affair)."""
    offered: Any = ray.cluster_resources
    total: dict[str, float] = offered()
    return {name: total.get(name, 0.0) for name in ("k3_group", "k3_stack")}


def _end_with_the_loop(task: asyncio.Task[None]) -> None:
    """A controller whose loop broke must not look alive: end the process, visibly."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("event=controller.loop_failed", exc_info=error)
        logging.shutdown()
        os._exit(_EXIT_FAILED)
