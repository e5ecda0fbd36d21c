"""In-process transport: the same contract between threads, nothing copied or encoded.

Envelopes are handed over in queues; arrays arrive as read-only views on the sender's memory. For
runs without a cluster and for tests. Servers are found through a `Hub` that both sides are given.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace

from k3ray.clock import Deadline
from k3ray.config.supernode import LanesConfig
from k3ray.errors import PeerLostError
from k3ray.ids import Incarnation, new_id
from k3ray.transport.channel import Channel
from k3ray.transport.client_core import ClientCore
from k3ray.transport.code_digest import process_digest
from k3ray.transport.envelope import Down, Reply, Request, Up, check_message
from k3ray.transport.protocol import Handler, Message
from k3ray.transport.server_core import ServerCore
from k3ray.transport.worker_server import WorkerServer


class _Wake:
    """Ends a wait in a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lost:
    """The server closed the channel of this generation."""

    generation: int


_Inbox = queue.SimpleQueue["tuple[_Address, Up] | _Wake"]
_Outbox = queue.SimpleQueue["Down | _Lost"]


@dataclass(slots=True, eq=False)
class _Address:
    """One client channel, compared by identity."""

    outbox: _Outbox
    generation: int
    gone: bool = False


class Hub:
    """Where in-process servers are found by endpoint."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, InProcessServer] = {}

    def add(self, endpoint: str, server: InProcessServer) -> None:
        """Make a server findable."""
        with self._lock:
            self._servers[endpoint] = server

    def remove(self, endpoint: str) -> None:
        """Forget a server; unknown endpoints are fine."""
        with self._lock:
            self._servers.pop(endpoint, None)

    def find(self, endpoint: str) -> InProcessServer | None:
        """The server at this endpoint, if it lives."""
        with self._lock:
            return self._servers.get(endpoint)


class InProcessServer(WorkerServer):
    """Serves as soon as it is made; see `Server`. Arguments as in `ZeroMqServer`."""

    def __init__(
        self,
        me: Incarnation,
        handler: Handler,
        *,
        lanes: LanesConfig,
        hub: Hub,
        digest: str | None = None,
    ) -> None:
        self._hub = hub
        self._inbox: _Inbox = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._addresses: set[_Address] = set()
        core = ServerCore(
            me, handler, lanes=lanes, digest=digest or process_digest(), transmit=_transmit
        )
        super().__init__(me, core, f"inproc://{new_id(str(me))}")
        self._thread.start()
        hub.add(self._endpoint, self)

    def attach(self, address: _Address) -> bool:
        """Register a client's channel; False when the server is closed."""
        with self._lock:
            if not self._closing:
                self._addresses.add(address)
            return not self._closing

    def detach(self, address: _Address) -> None:
        """Forget a client's channel."""
        address.gone = True
        with self._lock:
            self._addresses.discard(address)

    def put(self, address: _Address, item: Up) -> bool:
        """Hand an envelope over; False when the server is closed."""
        if self._closing:
            return False
        self._inbox.put((address, item))
        return True

    def _disconnect(self) -> None:
        with self._lock:
            for address in self._addresses:
                address.outbox.put(_Lost(generation=address.generation))

    def _release(self) -> None:
        self._hub.remove(self._endpoint)

    def _take_in(self, *, block: bool) -> None:
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if not isinstance(item, _Wake):
                self._core.receive(*item)

    def _wake(self) -> None:
        self._inbox.put(_Wake())


class _HubChannel(Channel):
    """A channel with the server's door."""

    def __init__(self, peer: Incarnation, address: _Address, server: InProcessServer) -> None:
        super().__init__(peer, address.generation)
        self.address = address
        self.server = server


class InProcessClient(ClientCore[_HubChannel]):
    """See `Client` and `ClientCore`."""

    def __init__(self, me: Incarnation, *, hub: Hub, digest: str | None = None) -> None:
        super().__init__(me, digest=digest)
        self._hub = hub
        self._outbox: _Outbox = queue.SimpleQueue()

    def _open(
        self, peer: Incarnation, generation: int, endpoint: str, deadline: Deadline
    ) -> _HubChannel:
        server = self._hub.find(endpoint)
        address = _Address(self._outbox, generation)
        if server is None or not server.attach(address):
            raise PeerLostError(
                f"{deadline.operation}: nobody listens on {endpoint}",
                remedy="ask the controller for the current plan",
                peer=str(peer),
                operation=deadline.operation,
            )
        return _HubChannel(peer, address, server)

    def _write(self, channel: _HubChannel, item: Up) -> bool:
        if isinstance(item, Request):
            check_message(item.message)
            item = replace(item, message=_frozen(item.message))
        return channel.server.put(channel.address, item)

    def _pump(self, channels: Collection[_HubChannel], timeout_s: float) -> None:
        try:
            item = self._outbox.get(block=timeout_s > 0.0, timeout=timeout_s or None)
            while True:
                self._take(item)
                item = self._outbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, item: Down | _Lost) -> None:
        for channel in self._channels.values():
            if channel.generation == item.generation:
                if isinstance(item, _Lost):
                    channel.lose()
                else:
                    self._settle(channel, item)
                return
        if not isinstance(item, _Lost):
            self.dropped_replies += 1

    def _shut(self, channel: _HubChannel) -> None:
        channel.server.detach(channel.address)


def _transmit(identity: Hashable, item: Down) -> bool:
    assert isinstance(identity, _Address)
    if identity.gone:
        return False
    if isinstance(item, Reply):
        check_message(item.message)
        item = replace(item, message=_frozen(item.message))
    identity.outbox.put(item)
    return True


def _frozen(message: Message) -> Message:
    """The same memory, which the receiver cannot write to."""
    views = tuple(array.view() for array in message.arrays)
    for view in views:
        view.flags.writeable = False
    return replace(message, arrays=views)
