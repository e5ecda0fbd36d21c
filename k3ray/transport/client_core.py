"""What a client does, whatever carries the envelopes: channels, fencing, waiting, dropping.

Subclasses open, write, pump and shut; everything a caller can observe is decided here, so that
both implementations keep one contract. A client belongs to one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from k3ray.clock import Deadline
from k3ray.errors import DeadlineError, K3RayError, PeerLostError
from k3ray.ids import Incarnation, refuse_lower_term
from k3ray.transport.channel import Channel, PendingReply
from k3ray.transport.code_digest import process_digest
from k3ray.transport.envelope import Down, Hello, Up, message_cost
from k3ray.transport.protocol import PROTOCOL_VERSION, Lane, Message, Pending

AnyChannel = TypeVar("AnyChannel", bound=Channel)


class ClientCore(ABC, Generic[AnyChannel]):
    """See `Client`.

    Args:
        me: Who speaks; servers refuse lower terms than the highest they have seen.
        digest: What to present; by default `process_digest()`.
    """

    def __init__(self, me: Incarnation, *, digest: str | None = None) -> None:
        self.me = me
        self.dropped_replies = 0
        """Answers that came after their request was given up, or for another generation."""
        self._digest = digest
        self._channels: dict[Incarnation, AnyChannel] = {}
        self._terms: dict[str, int] = {}
        self._generation = 0

    def connect(self, peer: Incarnation, endpoint: str, deadline: Deadline) -> None:
        """Open a channel and shake hands; see `Client.connect`. An open one is replaced."""
        seen = self._terms.get(peer.actor, 0)
        self._terms[peer.actor] = refuse_lower_term(seen=seen, offered=peer.term, who=peer.actor)
        for other in [known for known in self._channels if known.actor == peer.actor]:
            self.disconnect(other)
        self._generation += 1
        channel = self._open(peer, self._generation, endpoint, deadline)
        self._channels[peer] = channel
        try:
            self._shake_hands(channel, deadline)
        except BaseException:
            self.disconnect(peer)
            raise

    def send(self, peer: Incarnation, message: Message, *, lane: Lane) -> Pending:
        """Queue a request without blocking; see `Client.send`."""
        channel = self._channels.get(peer)
        if channel is None:
            raise self._not_connected(peer, message.op)
        cost = message_cost(message)
        if not channel.lost and not channel.affords(lane, cost):
            self._pump([channel], 0.0)
        request, pending = channel.request(message, lane, cost)
        try:
            sent = self._write(channel, request)
        except BaseException:
            channel.cancel(request)
            raise
        if not sent:
            channel.lose()
            raise channel.peer_lost(message.op)
        return pending

    def wait(self, pendings: Sequence[Pending], deadline: Deadline) -> list[Message]:
        """Replies in the order of `pendings`; see `Client.wait`."""
        mine = [self._own(pending) for pending in pendings]
        while True:
            replies = _collect(mine)
            if replies is not None:
                return replies
            left_s = deadline.left_s()
            waiting = {p.peer for p in mine if p.outcome is None}
            self._pump([self._channels[peer] for peer in waiting], left_s)
            if left_s == 0.0 and any(pending.outcome is None for pending in mine):
                raise self._give_up(mine, deadline)

    def wait_any(self, pendings: Sequence[Pending], deadline: Deadline) -> bool:
        """Whether one is done by the deadline; see `Client.wait_any`."""
        mine = [self._own(pending) for pending in pendings]
        while not any(pending.outcome is not None for pending in mine):
            left_s = deadline.left_s()
            self._pump([self._channels[peer] for peer in {p.peer for p in mine}], left_s)
            if left_s == 0.0:
                return any(pending.outcome is not None for pending in mine)
        return True

    def disconnect(self, peer: Incarnation) -> None:
        """Close the channel; what is in flight fails, late replies are dropped."""
        channel = self._channels.pop(peer, None)
        if channel is not None:
            channel.lose()
            self._shut(channel)

    def close(self) -> None:
        """Close all channels; idempotent."""
        for peer in list(self._channels):
            self.disconnect(peer)

    @abstractmethod
    def _open(
        self, peer: Incarnation, generation: int, endpoint: str, deadline: Deadline
    ) -> AnyChannel:
        """A way to the endpoint, able to carry a hello; raises `PeerLostError`, `DeadlineError`."""

    @abstractmethod
    def _write(self, channel: AnyChannel, item: Up) -> bool:
        """Check and send without blocking; False when the peer is gone."""

    @abstractmethod
    def _pump(self, channels: Collection[AnyChannel], timeout_s: float) -> None:
        """Wait until something happens on `channels`; `_settle` all that arrived, and only then
        `lose` the channels that broke."""

    @abstractmethod
    def _shut(self, channel: AnyChannel) -> None:
        """Release the channel's resources."""

    def _settle(self, channel: AnyChannel, item: Down) -> None:
        if not channel.settle(item):
            self.dropped_replies += 1

    def _shake_hands(self, channel: AnyChannel, deadline: Deadline) -> None:
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            generation=channel.generation,
            digest=self._digest or process_digest(),
            client=self.me,
            server=channel.peer,
        )
        if not self._write(channel, hello):
            raise channel.peer_lost(deadline.operation)
        while not channel.opened:
            left_s = deadline.left_s()
            self._pump([channel], left_s)
            if channel.refusal is not None:
                raise channel.refusal
            if channel.lost:
                raise channel.peer_lost(deadline.operation)
            if left_s == 0.0 and not channel.opened:
                raise _unanswered(channel.peer, "handshake", deadline)

    def _own(self, pending: Pending) -> PendingReply:
        assert isinstance(pending, PendingReply), "a pending of another transport"
        return pending

    def _give_up(self, pendings: Sequence[PendingReply], deadline: Deadline) -> K3RayError:
        """Fail whatever is unanswered, so that its late reply is dropped."""
        errors = []
        for pending in pendings:
            if pending.outcome is None:
                pending.outcome = _unanswered(pending.peer, pending.op, deadline)
                errors.append(pending.outcome)
        return errors[0]

    def _not_connected(self, peer: Incarnation, operation: str) -> PeerLostError:
        return PeerLostError(
            f"{operation}: {self.me} has no channel to {peer}",
            remedy="connect first; after a death ask the controller for the current plan",
            peer=str(peer),
            operation=operation,
        )


def _collect(pendings: Sequence[PendingReply]) -> list[Message] | None:
    replies = []
    for pending in pendings:
        if isinstance(pending.outcome, K3RayError):
            raise pending.outcome
        if pending.outcome is not None:
            replies.append(pending.outcome)
    return replies if len(replies) == len(pendings) else None


def _unanswered(peer: Incarnation, operation: str, deadline: Deadline) -> DeadlineError:
    return DeadlineError(
        f"{peer} did not answer {operation} within {deadline.limit_s:g} s",
        remedy="check that the peer is alive (k3ray status), then retry",
        peer=str(peer),
        operation=operation,
        deadline_s=deadline.limit_s,
    )
