"""Client side of one channel: credits, requests in flight, and what their answers were. Pure."""

from __future__ import annotations

from k3ray.errors import CapacityError, K3RayError, PeerLostError
from k3ray.ids import Incarnation
from k3ray.transport.envelope import (
    MAX_IN_FLIGHT,
    Down,
    Failure,
    Reply,
    Request,
    Welcome,
    message_cost,
)
from k3ray.transport.protocol import Lane, Message


class PendingReply:
    """A request in flight; see `Pending`."""

    __slots__ = ("op", "outcome", "peer", "request_id")

    def __init__(self, peer: Incarnation, request_id: int, op: str) -> None:
        self.peer = peer
        self.request_id = request_id
        self.op = op
        self.outcome: Message | K3RayError | None = None

    def done(self) -> bool:
        """Whether a reply or an error has arrived."""
        return self.outcome is not None


class Channel:
    """One generation of the way to one peer; `generation` is unique within its client."""

    def __init__(self, peer: Incarnation, generation: int) -> None:
        self.peer = peer
        self.generation = generation
        self.opened = False
        self.lost = False
        self.refusal: K3RayError | None = None
        self._grants: tuple[int, ...] = ()
        self._left: list[int] = []
        self._in_flight: dict[int, tuple[Lane, PendingReply]] = {}
        self._next_id = 1

    def request(self, message: Message, lane: Lane, cost: int) -> tuple[Request, PendingReply]:
        """Charge `cost` bytes of credit and number the request.

        Raises:
            CapacityError: credits are used up, or can never suffice.
            PeerLostError: the channel is down.
        """
        if self.lost:
            raise self.peer_lost(message.op)
        if not self.affords(lane, cost):
            raise self._no_credit(message.op, lane, cost)
        self._left[lane] -= cost
        pending = PendingReply(self.peer, self._next_id, message.op)
        self._next_id += 1
        self._in_flight[pending.request_id] = (lane, pending)
        request = Request(
            generation=self.generation, request_id=pending.request_id, lane=lane, message=message
        )
        return request, pending

    def affords(self, lane: Lane, cost: int) -> bool:
        """Whether a request of this cost could be sent now."""
        return cost <= self._left[lane] and len(self._in_flight) < MAX_IN_FLIGHT

    def cancel(self, request: Request) -> None:
        """Undo `request`, which was not sent after all."""
        self._in_flight.pop(request.request_id, None)
        self._left[request.lane] += message_cost(request.message)

    def settle(self, item: Down) -> bool:
        """Take what arrived; False if nobody waits for it and it was dropped."""
        if item.generation != self.generation or self.lost:
            return False
        if not self.opened:
            return self._settle_handshake(item)
        if isinstance(item, Welcome):
            return True  # the server only asks whether we are still here
        entry = self._in_flight.pop(item.request_id, None) if item.server == self.peer else None
        if entry is None:
            return False
        lane, pending = entry
        self._left[lane] += item.credit
        if pending.outcome is not None:
            return False
        pending.outcome = item.message if isinstance(item, Reply) else item.error
        return True

    def lose(self) -> None:
        """The connection is gone: fail everything in flight."""
        self.lost = True
        for _, pending in self._in_flight.values():
            if pending.outcome is None:
                pending.outcome = self.peer_lost(pending.op)
        self._in_flight.clear()

    def peer_lost(self, operation: str) -> PeerLostError:
        """The error of whatever this channel can no longer do."""
        return PeerLostError(
            f"{operation}: the connection to {self.peer} is gone",
            remedy="ask the controller for the current plan and resend to the new incarnation",
            peer=str(self.peer),
            operation=operation,
        )

    def _settle_handshake(self, item: Down) -> bool:
        if isinstance(item, Failure):
            # Also from a server that is not the one we look for: it says so.
            self.refusal = item.error
        elif isinstance(item, Welcome) and item.server == self.peer:
            self.opened = True
            self._grants = item.grants
            self._left = list(item.grants)
        else:
            return False
        return True

    def _no_credit(self, operation: str, lane: Lane, cost: int) -> CapacityError:
        name = lane.name.lower()
        if cost > self._grants[lane]:
            return CapacityError(
                f"{operation} needs {cost} bytes, {self.peer} grants {self._grants[lane]} on lane "
                f"{name}",
                remedy=f"send smaller pieces or raise lanes.{name}.credit_bytes",
                peer=str(self.peer),
                operation=operation,
            )
        return CapacityError(
            f"{operation} needs {cost} bytes, {self._left[lane]} of {self._grants[lane]} are left "
            f"at {self.peer} on lane {name}, {len(self._in_flight)} requests are in flight",
            remedy="wait for replies, then send again",
            peer=str(self.peer),
            operation=operation,
            retry_after_s=0.1,
        )
