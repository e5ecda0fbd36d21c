"""Round trip of one message through the transport, without any work at the other end.

ipc and tcp talk to a server in a process of its own, in-process to one on another thread. Prints
one JSON line per case: p20, p50, p80 and p99 in ms (goal: 8 KiB over ipc <= 0.3 ms p50 on an idle
machine). SIGKILL of a peer with a full queue is timed as well.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from bench_rows import record
from transport_peers import DIGEST, Peer, peer_processes, serve  # type: ignore[import-not-found]

from k3ray.clock import Deadline
from k3ray.config.supernode import LanesConfig
from k3ray.errors import PeerLostError
from k3ray.ids import Incarnation
from k3ray.transport.inprocess import Hub, InProcessClient, InProcessServer
from k3ray.transport.protocol import Client, Lane, Message
from k3ray.transport.zeromq_client import ZeroMqClient

GROUP = Incarnation(actor="group-0", term=1)
BENCH = Incarnation(actor="bench", term=1)


def deadline() -> Deadline:
    return Deadline.after(10.0, operation="bench", peer=str(GROUP))


def round_trips_ms(client: Client, size_bytes: int, repeats: int) -> list[float]:
    message = Message(op="echo", arrays=(np.zeros(size_bytes // 4, np.float32),))
    times = []
    for index in range(repeats + repeats // 10):
        started = time.perf_counter()
        client.wait([client.send(GROUP, message, lane=Lane.SERVE)], deadline())
        if index >= repeats // 10:
            times.append((time.perf_counter() - started) * 1e3)
    return times


def kill_ms(client: Client, peer: Peer) -> float:
    """From SIGKILL to `PeerLostError` with a queue that the peer has not drained."""
    peer.stop()
    message = Message(op="echo", arrays=(np.zeros(1 << 18, np.float32),))
    pendings = [client.send(GROUP, message, lane=Lane.TRAIN) for _ in range(200)]
    started = time.perf_counter()
    peer.signal(signal.SIGKILL)
    try:
        client.wait(pendings, deadline())
    except PeerLostError:
        return (time.perf_counter() - started) * 1e3
    raise AssertionError("the peer answered after its death")


def report(case: str, times: list[float], **more: Any) -> None:
    quantiles = np.percentile(times, [20, 50, 80, 99])
    names = ("p20_ms", "p50_ms", "p80_ms", "p99_ms")
    row = {name: round(float(value), 3) for name, value in zip(names, quantiles, strict=True)}
    record("transport", {"case": case, **row, "n": len(times), **more})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    with ExitStack() as stack:
        socket_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="k3")))
        start = stack.enter_context(peer_processes())
        hub = Hub()
        near = InProcessServer(GROUP, serve, lanes=LanesConfig(), hub=hub, digest=DIGEST)
        stack.callback(near.close)
        for kind in ("inprocess", "ipc", "tcp"):
            client: Client
            peer = None
            if kind == "inprocess":
                client, endpoint = InProcessClient(BENCH, hub=hub, digest=DIGEST), near.endpoint
            else:
                place = {"socket_dir": socket_dir} if kind == "ipc" else {"host": "127.0.0.1"}
                peer = start(GROUP, **place)
                client, endpoint = ZeroMqClient(BENCH, digest=DIGEST), peer.endpoint
            stack.callback(client.close)
            client.connect(GROUP, endpoint, deadline())
            report(f"{kind} 8 KiB", round_trips_ms(client, 8 << 10, repeats))
            report(f"{kind} 2 MiB", round_trips_ms(client, 2 << 20, repeats // 10))
            if peer is not None:
                report(f"{kind} SIGKILL, 200 MiB queued", [kill_ms(client, peer)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
