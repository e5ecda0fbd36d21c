"""`GroupLinks`: one thread's connections to expert groups, made as plans name new incarnations.

Several executors (versions, lanes) of the thread share it. A peer that is lost or replaced is
disconnected, so that a late reply of an old life is dropped and never read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from k3ray.clock import Deadline, monotonic
from k3ray.errors import TransportError
from k3ray.ids import Incarnation
from k3ray.placement.plan import GroupPeer, PlacementPlan
from k3ray.transport.protocol import Client, Lane, Message, Pending


class PlanSource(Protocol):
    """Where the current placement plan comes from."""

    def current(self) -> PlacementPlan:
        """The newest plan known here."""
        ...

    def wait_newer(self, than_version: int, deadline: Deadline) -> PlacementPlan:
        """The newest plan once its version exceeds `than_version`.

        Raises:
            DeadlineError: none came in time.
        """
        ...


AVOID_S = 10.0
"""How long a peer that failed once is passed over: by then the controller has verified it."""

PASS_OVER_S = 1.0
"""How long a peer that was late once is passed over."""

HEDGE_LEAST_S = 0.02
_HOPS_KEPT, _HOPS_PER_LOOK = 512, 64

LostCallback = Callable[[Incarnation, TransportError], None]
"""Told of every peer that died or missed a deadline; must return at once."""


class GroupLinks:
    """Connections over one `Client`; used by the thread that made it.

    Args:
        client: Sends and waits.
        connect_s: Deadline of a connect in seconds.
        on_lost: Told of suspected deaths (the controller verifies them).
    """

    def __init__(
        self, client: Client, *, connect_s: float = 5.0, on_lost: LostCallback | None = None
    ) -> None:
        self._client = client
        self._connect_s = connect_s
        self._on_lost = on_lost
        self._connected: dict[str, Incarnation] = {}
        self._avoided: dict[Incarnation, float] = {}
        self._hops_s: deque[float] = deque(maxlen=_HOPS_KEPT)
        self._num_hops = 0
        self._hedge_s = HEDGE_LEAST_S
        self.num_retries = 0
        """Parts that had to be sent again, to a replica or to another life of their group."""
        self.num_hedges = 0
        """Parts that were also sent to replicas because their answer was late."""

    def send(self, peer: GroupPeer, message: Message, *, lane: Lane) -> Pending:
        """Send to the current life of a group, connecting first if needed.

        Raises:
            CapacityError: the lane's credits are used up.
            PeerLostError, DeadlineError, HandshakeError, FencedError: see `Client`.
        """
        incarnation = peer.incarnation
        known = self._connected.get(incarnation.actor)
        if known != incarnation:
            if known is not None:
                self.forget(known)
            deadline = Deadline.after(self._connect_s, operation="connect", peer=str(incarnation))
            self._client.connect(incarnation, peer.endpoint, deadline)
            self._connected[incarnation.actor] = incarnation
        return self._client.send(incarnation, message, lane=lane)

    def wait(self, pending: Pending, deadline: Deadline) -> Message:
        """The reply of one request; raises as `Client.wait`."""
        return self._client.wait([pending], deadline)[0]

    def wait_any(self, pendings: Sequence[Pending], deadline: Deadline) -> bool:
        """Whether one of them is done by the deadline."""
        return self._client.wait_any(pendings, deadline)

    @property
    def hedge_s(self) -> float:
        """A hop that takes longer is also sent to replicas: max(20 ms, 5 x the p99 of hops)."""
        return self._hedge_s

    def note_hop(self, took_s: float) -> None:
        """A hop of a small batch was answered."""
        self._hops_s.append(took_s)
        self._num_hops += 1
        if self._num_hops % _HOPS_PER_LOOK == 0:
            p99_s = sorted(self._hops_s)[int(0.99 * (len(self._hops_s) - 1))]
            self._hedge_s = max(HEDGE_LEAST_S, 5 * p99_s)

    def pass_over(self, incarnation: Incarnation) -> None:
        """A replica was faster than this late peer: prefer replicas for a moment. Whether it is
        lost is for others to say."""
        self._avoided[incarnation] = monotonic() + PASS_OVER_S

    def suspect(self, incarnation: Incarnation, error: TransportError) -> None:
        """Pass on that a peer seems dead or stuck, and prefer its replicas for a while."""
        self._avoided[incarnation] = monotonic() + AVOID_S
        if self._on_lost is not None:
            self._on_lost(incarnation, error)

    def avoided(self) -> frozenset[Incarnation]:
        """Peers to be asked only where there is no other holder."""
        if self._avoided:
            now_s = monotonic()
            self._avoided = {peer: until for peer, until in self._avoided.items() if until > now_s}
        return frozenset(self._avoided)

    def forget(self, incarnation: Incarnation) -> None:
        """Disconnect a life that has ended; unknown ones are fine."""
        if self._connected.get(incarnation.actor) == incarnation:
            del self._connected[incarnation.actor]
            self._client.disconnect(incarnation)

    def close(self) -> None:
        """Close the client; idempotent."""
        self._connected.clear()
        self._client.close()


class FixedPlan:
    """A `PlanSource` of one plan that is never replaced (benches, one-off tools)."""

    def __init__(self, plan: PlacementPlan) -> None:
        self._plan = plan

    def current(self) -> PlacementPlan:
        """The plan."""
        return self._plan

    def wait_newer(self, than_version: int, deadline: Deadline) -> PlacementPlan:
        """The plan if it is newer; otherwise there is nothing to wait for."""
        if self._plan.version <= than_version:
            raise deadline.error("this plan is fixed")
        return self._plan
