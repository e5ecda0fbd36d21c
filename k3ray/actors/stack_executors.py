"""`StackExecutors`: makes the executors of an attention stack, over one set of connections.

Called by the engine's thread, on which the transport client lives. A group that seems dead is
reported to the controller, which verifies it; the report is sent from a thread of its own, so that
a slow control plane never holds up a hop.
"""

from __future__ import annotations

import threading

import ray
from ray.exceptions import RayError

from k3ray.actors.plan_holder import PlanHolder
from k3ray.actors.specs import CONTROLLER_NAME, NAMESPACE, StackSpec
from k3ray.clock import monotonic
from k3ray.errors import TransportError
from k3ray.ids import Incarnation
from k3ray.model.disaggregated import DisaggregatedExecutor, HopLimits
from k3ray.model.group_links import GroupLinks
from k3ray.model.self_test import handshake_digest
from k3ray.obs.log import get_log
from k3ray.transport.protocol import Lane
from k3ray.transport.zeromq_client import ZeroMqClient

_REPORT_EVERY_S = 1.0

_log = get_log(__name__)


class StackExecutors:
    """An `ExecutorFactory` for `ServeRunner`.

    Args:
        spec: Of the stack.
        plans: Where the current plan is.
    """

    def __init__(self, spec: StackSpec, plans: PlanHolder) -> None:
        self._spec = spec
        self._plans = plans
        self._links: GroupLinks | None = None
        self._reported_s: dict[str, float] = {}

    def __call__(self, version: str, lane: Lane) -> DisaggregatedExecutor:
        """The executor of a version on a lane; on the engine's thread."""
        deadlines = self._spec.deadlines
        if self._links is None:
            self._links = GroupLinks(
                ZeroMqClient(
                    self._spec.incarnation,
                    digest=handshake_digest(self._spec.text, self._spec.numeric_mode),
                ),
                connect_s=deadlines.commit_s,
                on_lost=self._report,
            )
        return DisaggregatedExecutor(
            self._links,
            self._plans,
            version=version,
            lane=lane,
            limits=HopLimits(
                hop_s=deadlines.hop_s,
                chunk_s=deadlines.prefill_chunk_s,
                rebuild_s=deadlines.rebuild_s,
            ),
        )

    @property
    def num_retries(self) -> int:
        """Parts of hops that were sent again because their group was lost."""
        return self._links.num_retries if self._links is not None else 0

    @property
    def num_hedges(self) -> int:
        """Parts of hops that were also sent to replicas because their answer was late."""
        return self._links.num_hedges if self._links is not None else 0

    def _report(self, lost: Incarnation, error: TransportError) -> None:
        now_s = monotonic()
        if now_s - self._reported_s.get(lost.actor, -_REPORT_EVERY_S) < _REPORT_EVERY_S:
            return
        self._reported_s[lost.actor] = now_s
        _log.warning("peer.lost", peer=str(lost), code=error.code)
        threading.Thread(
            target=report_lost, args=(lost, str(self._spec.incarnation)), daemon=True
        ).start()


def report_lost(lost: Incarnation, by: str) -> None:
    """Tell the controller of a suspected death; it also watches by itself, so this may fail."""
    try:
        controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
        controller.report_lost.remote(lost, by)
    except (ValueError, RayError) as error:
        _log.warning("peer.report_failed", peer=str(lost), reason=repr(error))
