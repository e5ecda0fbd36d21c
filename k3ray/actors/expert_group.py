"""`ExpertGroup`: the actor that hosts a shard of every MoE layer's routed experts.

Ray carries only its life and its control methods; latents come over the transport, straight into
the worker thread. Committed versions serve; the master of one line trains beside them. A group
that is refused once for its term exits by itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch

from k3ray.actors.group_handler import GroupHandler
from k3ray.actors.specs import GroupSpec
from k3ray.clock import Deadline
from k3ray.control.supervisor import Holding
from k3ray.errors import SupernodeError
from k3ray.ids import Incarnation, Role, refuse_lower_term
from k3ray.model.self_test import handshake_digest
from k3ray.placement.layout import GroupShare
from k3ray.transport.worker_server import WorkerServer
from k3ray.transport.zeromq_server import ZeroMqServer
from k3ray.weights.store import WeightStore


@ray.remote
class ExpertGroup:
    """One life of one group; see `GroupSpec`."""

    def __init__(self, spec: GroupSpec) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._store = WeightStore(Path(spec.store_dir))
        self._handler = GroupHandler(spec.text, spec.shares, store=self._store, line=spec.line)
        self._changing = threading.Lock()
        """Held while what is held changes: loads and layouts take each other's result as given."""
        self._controller_term = 0
        self._server: WorkerServer | None = None
        self._watched = threading.Event()

    def start(self) -> dict[str, Any]:
        """Open the data plane; returns pid, node and endpoint."""
        if self._server is None:
            self._server = ZeroMqServer(
                self._spec.incarnation,
                self._handler,
                lanes=self._spec.lanes,
                digest=handshake_digest(
                    self._spec.text, self._spec.numeric_mode, Role.EXPERT_GROUP
                ),
                socket_dir=Path(self._spec.socket_dir),
            )
        return {
            "pid": os.getpid(),
            "node": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "endpoint": self._server.endpoint,
        }

    def load_version(self, version: str, controller_term: int) -> str:
        """Make a committed version servable, from the own staged copy or the weight store.

        Raises:
            StoreError: it is not in the store or its checksums do not match.
            FencedError: the caller is an older controller.
        """
        self._admit(controller_term)
        with self._changing:
            if version in self._in_worker("versions", self._handler.versions):
                return version
            missing = self._in_worker("missing_names", lambda: self._handler.missing_names(version))
            tensors = self._store.open(self._spec.line, version).read(missing) if missing else {}
            self._in_worker("load_version", lambda: self._handler.load_version(version, tensors))
        return version

    def hold_layouts(self, shares: Mapping[int, GroupShare], controller_term: int) -> None:
        """Hold the experts of these layouts in every loaded version, and no others. It serves on
        meanwhile: versions are immutable, and the new ones are built beside them.

        Raises:
            StoreError: a version is not whole in the store; nothing changed.
            FencedError: the caller is an older controller.
        """
        self._admit(controller_term)
        with self._changing:
            loaded = self._in_worker("versions", self._handler.versions)
            versions = {version: self._handler.reshaped(version, shares) for version in loaded}
            self._in_worker("hold_layouts", lambda: self._handler.hold_layouts(shares, versions))

    def drop_version(self, version: str, controller_term: int) -> None:
        """Free a retired version; unknown ones are fine."""
        self._admit(controller_term)
        with self._changing:
            self._in_worker("drop_version", lambda: self._handler.drop_version(version))

    def status(self) -> dict[str, Any]:
        """Versions, bytes, training step, counters by operation and by lane; JSON-able."""
        status: dict[str, Any] = self._in_worker("status", self._handler.status)
        lanes = {
            lane.name.lower(): asdict(counters)
            for lane, counters in (self._server.counters if self._server else {}).items()
        }
        return {
            "incarnation": str(self._spec.incarnation), "pid": os.getpid(), "lanes": lanes, **status
        }  # fmt: skip

    def held(self, controller_term: int) -> Holding:
        """What this life holds; it obeys the caller, a later controller, from here on.

        Raises:
            FencedError: the caller is an older controller.
            SupernodeError: it has not been started.
        """
        self._admit(controller_term)
        if self._server is None:
            raise SupernodeError(
                f"{self._spec.incarnation} has not been started", remedy="it is replaced"
            )
        watched, self._watched = self._watched, threading.Event()
        watched.set()
        versions, shares = self._in_worker(
            "held", lambda: (self._handler.versions(), self._handler.shares())
        )
        return Holding(versions=frozenset(versions), shares=shares)

    def block_until_dead(self) -> None:
        """The pending call breaks when this process dies; it returns when another controller has
        taken over."""
        self._watched.wait()

    def _admit(self, controller_term: int) -> None:
        self._controller_term = refuse_lower_term(
            seen=self._controller_term, offered=controller_term, who=str(Role.CONTROLLER)
        )

    def _in_worker(self, operation: str, work: Any) -> Any:
        if self._server is None:
            return work()
        deadline = Deadline.after(
            self._spec.deadlines.prepare_s, operation=operation, peer=str(self.incarnation())
        )
        return self._server.run_in_worker(work, deadline)

    def incarnation(self) -> Incarnation:
        """Who this is."""
        return self._spec.incarnation
