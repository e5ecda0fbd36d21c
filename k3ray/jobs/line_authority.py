"""`RayLineAuthority`: the controller as a training job sees it; and `ControlWatch`, its ears.

Every call has a deadline and raises typed errors. `ControlWatch` is one background thread per
train worker: it long-polls for newer placement plans and sends heartbeats.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from k3ray.actors.plan_holder import PlanHolder
from k3ray.actors.ray_calls import call
from k3ray.actors.specs import CONTROLLER_NAME
from k3ray.config.supernode import DeadlineConfig
from k3ray.errors import K3RayError, TransportError
from k3ray.ids import Incarnation
from k3ray.train.authority import Json, StepRecord
from k3ray.weights.manifest import Meta, ShardInfo
from k3ray.weights.store import StagedEntry

_MARGIN_S = 5.0
_LONG_POLL_S = 5.0
_PAUSE_S = 1.0


class RayLineAuthority:
    """A `LineAuthority` over the controller actor.

    Args:
        controller: Its handle.
        lease_id: The line's lease.
        line: The line.
        deadlines: The supernode's.
    """

    def __init__(
        self, controller: Any, *, lease_id: str, line: str, deadlines: DeadlineConfig
    ) -> None:
        self._controller = controller
        self._lease_id = lease_id
        self._line = line
        self._deadlines = deadlines

    def begin_attempt(self, step: int) -> int:
        """See `LineAuthority`."""
        limit_s = self._deadlines.rebuild_s
        return int(self._call("begin_attempt", self._line, step, limit_s=limit_s))

    def commit_step(self, record: StepRecord) -> None:
        """See `LineAuthority`."""
        self._call("commit_step", record.to_body(), limit_s=self._deadlines.commit_s)

    def begin_checkpoint(self, step: int) -> StagedEntry:
        """See `LineAuthority`."""
        limit_s = self._deadlines.commit_s
        staged: StagedEntry = self._call("begin_checkpoint", self._line, step, limit_s=limit_s)
        return staged

    def commit_checkpoint(
        self, staged: StagedEntry, shards: Sequence[ShardInfo], meta: Meta
    ) -> str:
        """See `LineAuthority`."""
        limit_s = self._deadlines.prepare_s
        return str(self._call("commit_checkpoint", staged, shards, meta, limit_s=limit_s))

    def begin_publish(self, step: int) -> StagedEntry:
        """See `LineAuthority`."""
        limit_s = self._deadlines.prepare_s
        staged: StagedEntry = self._call("begin_publish", self._line, step, limit_s=limit_s)
        return staged

    def commit_publish(self, staged: StagedEntry, shards: Sequence[ShardInfo], meta: Meta) -> str:
        """See `LineAuthority`."""
        limit_s = 2 * self._deadlines.rebuild_s
        return str(self._call("commit_publish", staged, shards, meta, limit_s=limit_s))

    def report(self, metrics: Mapping[str, Json]) -> None:
        """See `LineAuthority`; nobody waits for it."""
        self._controller.report_training.remote(self._line, dict(metrics))

    def _call(self, method: str, *args: Any, limit_s: float) -> Any:
        return call(
            self._controller, method, self._lease_id, *args, peer=CONTROLLER_NAME,
            limit_s=limit_s + _MARGIN_S,
        )  # fmt: skip


class ControlWatch:
    """Keeps a train worker's `plans` current and the controller aware of it.

    Args:
        controller: Its handle.
        incarnation: This worker, as registered.
    """

    def __init__(self, controller: Any, incarnation: Incarnation) -> None:
        self._controller = controller
        self._incarnation = incarnation
        self._ended = threading.Event()
        plan = call(controller, "plan", peer=CONTROLLER_NAME, limit_s=_LONG_POLL_S)
        self.plans = PlanHolder(plan)
        self._thread = threading.Thread(target=self._watch, name="control-watch", daemon=True)
        self._thread.start()

    def on_lost(self, incarnation: Incarnation, error: TransportError) -> None:
        """Report a suspected death; the controller looks for itself."""
        self._controller.report_lost.remote(incarnation, str(self._incarnation))

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(2 * _LONG_POLL_S)

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                self._controller.heartbeat.remote(self._incarnation)
                plan = call(
                    self._controller, "wait_plan", self.plans.version, _LONG_POLL_S,
                    peer=CONTROLLER_NAME, limit_s=2 * _LONG_POLL_S,
                )  # fmt: skip
                if plan is not None:
                    self.plans.set(plan)
            except (K3RayError, ray.exceptions.RayError):
                self._ended.wait(_PAUSE_S)  # the step's own calls fail with the reason
