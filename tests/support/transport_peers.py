"""Servers for transport tests and benches: one handler, and servers in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from k3ray.clock import Deadline
from k3ray.config.supernode import LanesConfig
from k3ray.errors import StaleVersionError
from k3ray.ids import Incarnation
from k3ray.transport.protocol import Message
from k3ray.transport.zeromq_server import ZeroMqServer

DIGEST = "test-digest"
"""Fixed, so that a source edited between two spawns fails no test."""


def serve(message: Message) -> Generator[None, None, Message]:
    """The ops of the tests: echo, sum, spin (busy pieces), fail, crash, empty."""
    match message.op:
        case "echo":
            yield
            return message
        case "sum":
            yield
            return Message(op="sum", arrays=tuple(np.sum(a, keepdims=True) for a in message.arrays))
        case "spin":
            for _ in range(int(message.meta["pieces"] or 0)):
                until = time.perf_counter() + float(message.meta["piece_s"] or 0.0)
                while time.perf_counter() < until:
                    pass
                yield
            return Message(op="spun", meta=message.meta)
        case "fail":
            raise StaleVersionError(
                "version main@3 is not live", remedy="use main@4", version="main@3", live=[4]
            )
        case "crash":
            raise ZeroDivisionError("secret payload text")
        case "bad-reply":
            return Message(op="bad", arrays=(np.zeros((4, 4))[:, ::2],))
    return Message(op="empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server process."""

    incarnation: Incarnation
    endpoint: str
    process: BaseProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped."""
        self.signal(signal.SIGSTOP)
        deadline = Deadline.after(10.0, operation="SIGSTOP", peer=str(self.pid))
        tasks = Path(f"/proc/{self.pid}/task")
        while any(_state(task) != "T" for task in tasks.iterdir()):
            deadline.check()

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def _server_process(connection: Any, kwargs: dict[str, Any]) -> None:
    def counting(message: Message) -> Generator[None, None, Message]:
        if message.op == "count":
            requests = sum(counters.requests for counters in server.counters.values())
            return Message(op="count", meta={"requests": requests})
        return (yield from serve(message))

    server = ZeroMqServer(kwargs.pop("me"), counting, digest=DIGEST, **kwargs)
    connection.send(server.endpoint)
    connection.recv()
    server.close()


@contextmanager
def peer_processes() -> Iterator[Callable[..., Peer]]:
    """Gives `start(me, **ZeroMqServer kwargs)`; every process is ended on the way out."""
    spawn = multiprocessing.get_context("spawn")
    started: list[tuple[BaseProcess, Any]] = []

    def start(me: Incarnation, *, lanes: LanesConfig | None = None, **kwargs: Any) -> Peer:
        ours, theirs = spawn.Pipe()
        kwargs |= {"me": me, "lanes": lanes or LanesConfig()}
        process = spawn.Process(target=_server_process, args=(theirs, kwargs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
        assert ours.poll(60.0), "the server process did not start"
        return Peer(incarnation=me, endpoint=ours.recv(), process=process)

    try:
        yield start
    finally:
        for process, ours in started:
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)
                ours.send("stop")
            process.join(20.0)
            if process.is_alive():
                process.kill()
                process.join()
            ours.close()
