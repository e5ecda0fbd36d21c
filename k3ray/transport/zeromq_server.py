"""ZeroMQ server of one incarnation: a ROUTER socket owned by one worker thread.

The IO thread is libzmq's own: it takes frames off the wire without Python or its GIL, while the
worker computes. The worker looks at the socket between any two pieces of work and sleeps on it
when idle, so a request costs no hand-off between Python threads. The endpoint is new for every
incarnation and never used again.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Hashable
from pathlib import Path

import zmq

from k3ray.config.supernode import LanesConfig
from k3ray.errors import TransportError
from k3ray.ids import Incarnation
from k3ray.transport import frames
from k3ray.transport.code_digest import process_digest
from k3ray.transport.envelope import MAX_IN_FLIGHT, Down
from k3ray.transport.lanes import lane_configs
from k3ray.transport.protocol import Handler
from k3ray.transport.server_core import ServerCore
from k3ray.transport.wire import decode_up, encode_down
from k3ray.transport.worker_server import WorkerServer

UNIX_PATH_LIMIT = 107
_LAST_REPLIES_MS = 250
_INTAKE = 64
"""Messages taken off the socket between two pieces of work; more would let a flood stall them."""


class ZeroMqServer(WorkerServer):
    """Serves as soon as it is made; see `Server`.

    Args:
        me: This incarnation.
        handler: Serves one request; runs on the worker thread.
        lanes: Credits, shares and quantum.
        socket_dir: Folder for a Unix socket; made if missing. Give this or `host`.
        host: Address to listen on with TCP, at a port that the kernel picks.
        digest: What clients must present; by default `process_digest()`.

    Raises:
        TransportError: the socket path is too long or the address cannot be bound.
    """

    def __init__(
        self,
        me: Incarnation,
        handler: Handler,
        *,
        lanes: LanesConfig,
        socket_dir: Path | None = None,
        host: str | None = None,
        digest: str | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._router = _router(self._context, lanes)
        self.malformed = 0
        """Messages that could not be understood and were dropped."""
        try:
            endpoint = _bind(self._router, me, socket_dir, host)
        except BaseException:
            self._router.close(linger=0)
            self._context.term()
            raise
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        core = ServerCore(
            me, handler, lanes=lanes, digest=digest or process_digest(), transmit=self._transmit
        )
        super().__init__(me, core, endpoint)
        self._thread.start()

    def _take_in(self, *, block: bool) -> None:
        if block:
            for source, _ in self._poller.poll():
                if source == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
        for _ in range(_INTAKE):
            if not frames.readable(self._router):
                return
            identity, *parts = frames.receive(self._router, num_small=2)
            try:
                item = decode_up(parts)
            except TransportError:
                self.malformed += 1
                continue
            self._core.receive(identity, item)

    def _transmit(self, identity: Hashable, item: Down) -> bool:
        assert isinstance(identity, bytes)
        try:
            frames.send(self._router, [identity, *encode_down(item)])
        except zmq.ZMQError as error:
            # EAGAIN: the client has stopped reading although its credits bound what it can have
            # coming, so it is as good as gone.
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        return True

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _disconnect(self) -> None:
        self._router.close(linger=_LAST_REPLIES_MS)
        self._context.term()
        if self._endpoint.startswith("ipc://"):
            # libzmq unlinks only what it made with a wildcard.
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _release(self) -> None:
        os.close(self._wake_fd)


def _router(context: zmq.Context[zmq.Socket[bytes]], lanes: LanesConfig) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDTIMEO, 0)
    router.setsockopt(zmq.SNDHWM, MAX_IN_FLIGHT + 64)
    router.setsockopt(zmq.RCVHWM, MAX_IN_FLIGHT + 64)
    # A frame larger than every credit cannot be meant for us.
    largest = max(config.credit_bytes for config in lane_configs(lanes))
    router.setsockopt(zmq.MAXMSGSIZE, largest + (1 << 20))
    return router


def _bind(
    router: zmq.Socket[bytes], me: Incarnation, socket_dir: Path | None, host: str | None
) -> str:
    if (socket_dir is None) == (host is None):
        raise TransportError("give either socket_dir or host", remedy="pass exactly one of them")
    if host is not None:
        wanted = f"tcp://{host}:0"
    else:
        assert socket_dir is not None
        wanted = f"ipc://{_socket_path(socket_dir, me)}"
    try:
        router.bind(wanted)
    except zmq.ZMQError as error:
        raise TransportError(
            f"{me} cannot listen on {wanted}: {error}",
            remedy="check that the address belongs to this machine and the folder is writable",
            endpoint=wanted,
        ) from error
    endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


def _socket_path(socket_dir: Path, me: Incarnation) -> Path:
    socket_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = socket_dir / f"{me.actor}.{me.term}.{secrets.token_hex(4)}.sock"
    if len(os.fsencode(path)) > UNIX_PATH_LIMIT:
        raise TransportError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, the system allows "
            f"{UNIX_PATH_LIMIT}",
            remedy="use a shorter socket folder",
            path=str(path),
        )
    for older in socket_dir.glob(f"{me.actor}.*.sock"):
        # A life that was killed leaves its file; it is fenced, so nobody may connect to it.
        term = older.name.removeprefix(f"{me.actor}.").partition(".")[0]
        if term.isdecimal() and int(term) < me.term:
            older.unlink(missing_ok=True)
    return path
