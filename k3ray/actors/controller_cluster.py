"""`ActorCluster`: the controller's only door to Ray: start, fence, ask an actor, watch it die.

Every call has a deadline and translates Ray's errors: a dead actor is `PeerLostError`, silence is
`DeadlineError`, what the actor raised comes through typed. Fencing is SIGKILL of the very process
(pid and start time), because an actor that is stopped does not obey Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from k3ray.actors.names import actor_name
from k3ray.actors.ray_calls import call_async
from k3ray.actors.specs import NAMESPACE, GroupSpec, StackSpec
from k3ray.clock import Deadline
from k3ray.config.model import TextConfig
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.supervisor import Holding, ProcessFacts
from k3ray.errors import FencedError, PeerLostError
from k3ray.ids import Incarnation, Role
from k3ray.placement.layout import GroupShare

ACTOR_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_GROUP_CONCURRENCY = 16
"""Threads of a group actor: the pending watch call, and control calls beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where a supernode's files lie."""

    store_dir: Path
    socket_dir: Path
    journal_file: Path


class ActorCluster:
    """See the module. `term` is the controller's own term, sent with every order."""

    def __init__(
        self, spec: SupernodeSpec, text: TextConfig, folders: Folders, *, term: int
    ) -> None:
        self._spec = spec
        self._text = text
        self._folders = folders
        self._term = term
        self._handles: dict[Incarnation, Any] = {}

    async def start(
        self, incarnation: Incarnation, role: Role, shares: Mapping[int, GroupShare]
    ) -> ProcessFacts:
        """Create the actor of a new life and wait until it has started.

        Args:
            shares: What a group holds by each live layout.

        Raises:
            DeadlineError, PeerLostError: it did not come up.
            K3RayError: what its `start` raised.
        """
        handle = self._create(incarnation, role, shares)
        self._handles[incarnation] = handle
        answer = await self.call(incarnation, "start", limit_s=self._spec.deadlines.start_s)
        pid = int(answer["pid"])
        return ProcessFacts(
            node=str(answer["node"]),
            pid=pid,
            process_started_unix_s=process_started(pid),
            endpoint=str(answer["endpoint"]),
        )

    def _create(
        self, incarnation: Incarnation, role: Role, shares: Mapping[int, GroupShare]
    ) -> Any:
        # Imported here: both pull in torch, which the rest of the controller does without.
        from k3ray.actors.attention_stack import AttentionStack
        from k3ray.actors.expert_group import ExpertGroup

        group: Any = ExpertGroup
        stack: Any = AttentionStack

        common: dict[str, Any] = {
            "name": actor_name(incarnation), "namespace": NAMESPACE, "lifetime": "detached",
            "num_cpus": 0, "max_restarts": 0, "max_task_retries": 0,
            "runtime_env": {"env_vars": dict(ACTOR_ENVIRONMENT)},
        }  # fmt: skip
        if role is Role.EXPERT_GROUP:
            options = {
                **common, "resources": {"k3_group": 1}, "max_concurrency": _GROUP_CONCURRENCY,
            }  # fmt: skip
            return group.options(**options).remote(self._group_spec(incarnation, shares))
        options = {**common, "resources": {"k3_stack": 1}}
        return stack.options(**options).remote(self._stack_spec(incarnation))

    def _group_spec(self, incarnation: Incarnation, shares: Mapping[int, GroupShare]) -> GroupSpec:
        return GroupSpec(
            incarnation=incarnation, text=self._text, shares=shares, line=self._spec.line,
            store_dir=str(self._folders.store_dir), socket_dir=str(self._folders.socket_dir),
            lanes=self._spec.lanes, numeric_mode=self._spec.numeric_mode,
            deadlines=self._spec.deadlines,
        )  # fmt: skip

    def _stack_spec(self, incarnation: Incarnation) -> StackSpec:
        return StackSpec(
            incarnation=incarnation, text=self._text, line=self._spec.line,
            store_dir=str(self._folders.store_dir), engine=self._spec.engine,
            numeric_mode=self._spec.numeric_mode, deadlines=self._spec.deadlines,
        )  # fmt: skip

    async def ask_held(self, incarnation: Incarnation, *, limit_s: float) -> Holding:
        """Find the actor of an earlier controller and ask what it holds; it obeys us from then on.

        Raises:
            PeerLostError, DeadlineError: there is none, it is dead or silent.
            FencedError: it has seen a later controller.
        """
        try:
            handle = await asyncio.to_thread(
                ray.get_actor, actor_name(incarnation), namespace=NAMESPACE
            )
        except ValueError as error:
            raise PeerLostError(
                f"Ray does not know {incarnation}", remedy="it is replaced",
                peer=str(incarnation), operation="held",
            ) from error  # fmt: skip
        self._handles[incarnation] = handle
        held: Holding = await self.call(incarnation, "held", self._term, limit_s=limit_s)
        return held

    async def call(self, incarnation: Incarnation, method: str, *args: Any, limit_s: float) -> Any:
        """Ask an actor.

        Raises:
            PeerLostError, DeadlineError: it is dead or silent.
            K3RayError: what it raised.
        """
        handle = self._handles.get(incarnation)
        if handle is None:
            raise PeerLostError(
                f"{incarnation} was ended before it was asked for {method}",
                remedy="its replacement is in the plan; see `k3ray status`",
                peer=str(incarnation), operation=method,
            )  # fmt: skip
        return await call_async(handle, method, *args, peer=str(incarnation), limit_s=limit_s)

    async def order(self, incarnation: Incarnation, method: str, *args: Any) -> Any:
        """`call` with the controller's term appended and the rebuild deadline."""
        return await self.call(
            incarnation, method, *args, self._term, limit_s=self._spec.deadlines.rebuild_s
        )

    async def until_dead(self, incarnation: Incarnation) -> str:
        """Wait for the end of a life, as long as that takes; returns how it was seen.

        Raises:
            FencedError: the actor obeys a later controller.
        """
        handle = self._handles.get(incarnation)
        if handle is None:
            return "its handle is gone"
        try:
            # No deadline by intent: this call's breaking is the news. Silence is seen by pings.
            await asyncio.wrap_future(handle.block_until_dead.remote().future())
        except RayError as error:
            return f"its process ended ({type(error).__name__})"
        raise FencedError(
            f"{incarnation} obeys a later controller", remedy="this controller must exit",
            who=str(incarnation),
        )  # fmt: skip

    async def fence(
        self, incarnation: Incarnation, facts: ProcessFacts | None, *, limit_s: float
    ) -> None:
        """End a life for certain.

        Raises:
            DeadlineError: the process is still there after `limit_s`.
        """
        self._ray_kill(incarnation)
        if facts is None or facts.node != own_node():
            return
        deadline = Deadline.after(limit_s, operation="fence", peer=str(incarnation))
        while is_alive(facts):
            kill_process(facts)
            deadline.check(remedy=f"kill process {facts.pid} by hand")
            await asyncio.sleep(0.02)

    def _ray_kill(self, incarnation: Incarnation) -> None:
        handle = self._handles.pop(incarnation, None)
        try:
            if handle is None:
                handle = ray.get_actor(actor_name(incarnation), namespace=NAMESPACE)
            ray.kill(handle, no_restart=True)
        except (ValueError, RayError):
            return  # Ray does not know it any more; the process itself is ended by pid


def open_requests(stats: Mapping[str, Any]) -> int:
    """Open requests of a stack by its last answer."""
    return sum(int(stats.get(key, 0)) for key in ("running", "waiting"))


def own_node() -> str:
    """This node as Ray names it."""
    address: Any = ray.util.get_node_ip_address
    return str(address())


def process_started(pid: int) -> float:
    """Start of a process in Unix seconds; 0.0 when it is not on this node (or gone)."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return 0.0


def is_alive(facts: ProcessFacts) -> bool:
    """Whether the very process still lives on this node; a zombie does not."""
    process = _process(facts)
    try:
        return process is not None and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_stopped(facts: ProcessFacts) -> bool:
    """Whether the process is stopped (SIGSTOP)."""
    process = _process(facts)
    try:
        return process is not None and process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def kill_process(facts: ProcessFacts) -> None:
    """SIGKILL the very process; gone is fine."""
    if _process(facts) is not None:
        try:
            os.kill(facts.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _process(facts: ProcessFacts) -> psutil.Process | None:
    """The process, unless its pid was given to another since."""
    try:
        process = psutil.Process(facts.pid)
        same = abs(process.create_time() - facts.process_started_unix_s) < 1.0
    except psutil.NoSuchProcess:
        return None
    return process if same else None
