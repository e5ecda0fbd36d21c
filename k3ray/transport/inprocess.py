"""In-process transport: the same contract between threads, nothing copied or encoded.

Envelopes are handed over in queues; arrays arrive as read-only views on the sender's memory. For
runs without a cluster and for tests. Servers are found through a `Hub` that both sides are given.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace

from k3ray.clock import Deadline
from k3ray.config.supernode import LanesConfig
from k3ray.errors import PeerLostError
from k3ray.ids import Incarnation, new_id
from k3ray.transport.channel import Channel
from k3ray.transport.client_core import ClientCore
from k3ray.transport.code_digest import code_digest
from k3ray.transport.control_queue import ControlQueue
from k3ray.transport.envelope import Down, Reply, Request, Up, check_message
from k3ray.transport.protocol import Handler, Lane, Message
from k3ray.transport.server_core import LaneCounters, ServerCore

_log = logging.getLogger("k3ray.transport")

CLOSE_LIMIT_S = 10.0


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


class InProcessServer:
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
        self._core = ServerCore(
            me, handler, lanes=lanes, digest=digest or code_digest(), transmit=_transmit
        )
        self._hub = hub
        self._endpoint = f"inproc://{new_id(str(me))}"
        self._inbox: _Inbox = queue.SimpleQueue()
        self._control = ControlQueue(self._wake)
        self._lock = threading.Lock()
        self._addresses: set[_Address] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"worker-{me}", daemon=True)
        self._thread.start()
        hub.add(self._endpoint, self)

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._endpoint

    @property
    def counters(self) -> Mapping[Lane, LaneCounters]:
        """Live counters by lane; read only."""
        return self._core.counters

    def run_in_worker(self, work: Callable[[], object], deadline: Deadline) -> object:
        """Run `work` on the worker thread; see `ControlQueue.call`."""
        return self._control.call(work, deadline)

    def close(self) -> None:
        """Stop, answering what waits with `PeerLostError`; idempotent.

        Raises:
            DeadlineError: the running piece of work did not end.
        """
        deadline = Deadline.after(CLOSE_LIMIT_S, operation="close", peer=self._endpoint)
        self._hub.remove(self._endpoint)
        self._closing = True
        self._wake()
        self._thread.join(deadline.left_s())
        if self._thread.is_alive():
            raise deadline.error("the handler's running piece of work is stuck")

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

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_in()
                self._control.run_pending()
                self._core.step()
        except Exception:
            # Nobody waits for this thread; the lost channels tell every client.
            _log.exception("event=transport.worker_died endpoint=%s", self._endpoint)
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        self._closing = True
        self._control.close()
        self._core.shutdown()
        with self._lock:
            for address in self._addresses:
                address.outbox.put(_Lost(generation=address.generation))

    def _take_in(self) -> None:
        """Take everything that has arrived; wait for something when there is nothing to do."""
        block = not self._core.has_work()
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
