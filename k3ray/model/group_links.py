"""`GroupLinks`: one thread's connections to expert groups, made as plans name new incarnations.

Several executors (versions, lanes) of the thread share it. A peer that is lost or replaced is
disconnected, so that a late reply of an old life is dropped and never read.
"""

from __future__ import annotations

from collections.abc import Callable
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
        self.num_retries = 0
        """Parts that had to be sent again, to a replica or to another life of their group."""

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
