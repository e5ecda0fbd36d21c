"""ZeroMQ client: one DEALER and one monitor per peer incarnation, never reconnected.

`IMMEDIATE` and no reconnection mean that what was queued for a dead peer dies with its socket
instead of reaching the next one at that address. The monitor reports a broken connection within
milliseconds; a peer that is stopped, not dead, is found by the deadline.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

import zmq
from zmq.utils.monitor import parse_monitor_message

from k3ray.clock import Deadline
from k3ray.errors import TransportError
from k3ray.ids import Incarnation
from k3ray.transport import frames
from k3ray.transport.channel import Channel
from k3ray.transport.client_core import ClientCore
from k3ray.transport.envelope import MAX_IN_FLIGHT, Up
from k3ray.transport.wire import decode_down, encode_up

_POLLIN = int(zmq.POLLIN)
_DEATHS = int(
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class SocketChannel(Channel):
    """A channel with its sockets."""

    def __init__(
        self,
        peer: Incarnation,
        generation: int,
        *,
        dealer: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
    ) -> None:
        super().__init__(peer, generation)
        self.dealer = dealer
        self.monitor = monitor


class ZeroMqClient(ClientCore[SocketChannel]):
    """See `Client` and `ClientCore`."""

    def __init__(self, me: Incarnation, *, digest: str | None = None) -> None:
        super().__init__(me, digest=digest)
        self._context = zmq.Context()

    def close(self) -> None:
        """Close all channels and stop libzmq's thread; idempotent."""
        super().close()
        self._context.term()

    def _open(
        self, peer: Incarnation, generation: int, endpoint: str, deadline: Deadline
    ) -> SocketChannel:
        dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.SNDTIMEO, 0),
            (zmq.SNDHWM, MAX_IN_FLIGHT + 64),
            (zmq.RCVHWM, MAX_IN_FLIGHT + 64),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            dealer.setsockopt(option, value)
        monitor = dealer.get_monitor_socket(_DEATHS)
        channel = SocketChannel(peer, generation, dealer=dealer, monitor=monitor)
        try:
            try:
                dealer.connect(endpoint)
            except zmq.ZMQError as error:
                raise TransportError(
                    f"{endpoint} is no address of {peer}: {error}",
                    remedy="use the endpoint that the peer announced",
                    endpoint=endpoint,
                ) from error
            self._wait_writable(channel, deadline)
        except BaseException:
            self._shut(channel)
            raise
        return channel

    def _wait_writable(self, channel: SocketChannel, deadline: Deadline) -> None:
        """With `IMMEDIATE`, writable means that the peer has accepted us."""
        sources = [(channel.dealer, zmq.POLLOUT), (channel.monitor, zmq.POLLIN)]
        ready = dict(zmq.zmq_poll(sources, _timeout_ms(deadline.left_s())))
        if channel.monitor in ready:
            raise channel.peer_lost(deadline.operation)
        if channel.dealer not in ready:
            raise deadline.error()

    def _write(self, channel: SocketChannel, item: Up) -> bool:
        parts = encode_up(item)
        try:
            frames.send(channel.dealer, parts)
        except zmq.ZMQError as error:
            # Credits keep the queue below its mark, so EAGAIN means that there is no connection.
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True

    def _pump(self, channels: Collection[SocketChannel], timeout_s: float) -> None:
        sources = [(channel.dealer, _POLLIN) for channel in channels]
        sources += [(channel.monitor, _POLLIN) for channel in channels]
        ready = {socket for socket, _ in zmq.zmq_poll(sources, _timeout_ms(timeout_s))}
        for channel in channels:
            died = channel.monitor in ready and _read_death(channel.monitor)
            if died or channel.dealer in ready:
                self._take_in(channel)
            if died:
                channel.lose()

    def _take_in(self, channel: SocketChannel) -> None:
        while frames.readable(channel.dealer):
            parts = frames.receive(channel.dealer, num_small=1)
            self._settle(channel, decode_down(parts))

    def _shut(self, channel: SocketChannel) -> None:
        channel.dealer.disable_monitor()
        channel.monitor.close(linger=0)
        channel.dealer.close(linger=0)


def _read_death(monitor: zmq.Socket[bytes]) -> bool:
    died = False
    while True:
        try:
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return died
        died = died or bool(event["event"] & _DEATHS)


def _timeout_ms(left_s: float) -> int:
    """Rounded up, so that a wait never ends just before its deadline and spins."""
    return int(-(-left_s * 1000 // 1))
