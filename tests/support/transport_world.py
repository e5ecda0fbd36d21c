"""Shared pieces of the transport contract tests: a client and servers of one kind."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3ray.clock import Deadline
from k3ray.config.supernode import LaneConfig, LanesConfig
from k3ray.ids import Incarnation
from k3ray.transport.inprocess import Hub, InProcessClient, InProcessServer
from k3ray.transport.protocol import Array, Client, Handler, Lane, Message
from k3ray.transport.zeromq_client import ZeroMqClient
from k3ray.transport.zeromq_server import ZeroMqServer
from tests.support.transport_peers import DIGEST, serve

GROUP = Incarnation(actor="group-0", term=3)
STACK = Incarnation(actor="stack-0", term=1)
SMALL_LANES = LanesConfig(
    serve=LaneConfig(credit_bytes=10_000, min_share=0.3),
    score=LaneConfig(credit_bytes=10_000),
    train=LaneConfig(credit_bytes=50_000, min_share=0.1),
)


def limit(seconds: float = 20.0, operation: str = "test") -> Deadline:
    return Deadline.after(seconds, operation=operation, peer=str(GROUP))


@dataclass
class World:
    """Makes servers and clients of one implementation and closes them."""

    kind: str
    socket_dir: Path
    stack: ExitStack
    hub: Hub = field(default_factory=Hub)

    def server(
        self, handler: Handler = serve, *, me: Incarnation = GROUP, lanes: LanesConfig | None = None
    ) -> Any:
        lanes = lanes or LanesConfig()
        server: Any
        if self.kind == "inprocess":
            server = InProcessServer(me, handler, lanes=lanes, hub=self.hub, digest=DIGEST)
        elif self.kind == "ipc":
            server = ZeroMqServer(
                me, handler, lanes=lanes, socket_dir=self.socket_dir, digest=DIGEST
            )
        else:
            server = ZeroMqServer(me, handler, lanes=lanes, host="127.0.0.1", digest=DIGEST)
        self.stack.callback(server.close)
        return server

    def client(self, me: Incarnation = STACK, digest: str = DIGEST) -> Any:
        client: Any
        if self.kind == "inprocess":
            client = InProcessClient(me, hub=self.hub, digest=digest)
        else:
            client = ZeroMqClient(me, digest=digest)
        self.stack.callback(client.close)
        return client

    def pair(self, handler: Handler = serve, *, lanes: LanesConfig | None = None) -> Any:
        server, client = self.server(handler, lanes=lanes), self.client()
        client.connect(GROUP, server.endpoint, limit())
        return server, client


def ask(client: Client, op: str, *arrays: Array, lane: Lane = Lane.SERVE, **meta: Any) -> Message:
    pending = client.send(GROUP, Message(op=op, meta=meta, arrays=arrays), lane=lane)
    [reply] = client.wait([pending], limit())
    return reply


class Gate:
    """A handler that holds every request of op "hold" at a gate, and logs what it serves."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.served: list[str] = []

    def __call__(self, message: Message) -> Generator[None, None, Message]:
        if message.op == "hold":
            self.entered.set()
            assert self.open.wait(20.0)
        yield
        self.served.append(str(message.meta.get("name", message.op)))
        return message
