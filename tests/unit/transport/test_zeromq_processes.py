"""ZeroMQ between processes: deaths, new lives, stops and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from k3ray.clock import Deadline
from k3ray.config.supernode import LaneConfig, LanesConfig
from k3ray.errors import CapacityError, DeadlineError, PeerLostError, TransportError
from k3ray.ids import Incarnation
from k3ray.transport.protocol import Lane, Message
from k3ray.transport.zeromq_client import ZeroMqClient
from k3ray.transport.zeromq_server import ZeroMqServer
from tests.support.transport_peers import DIGEST, Peer, peer_processes, serve

GROUP = Incarnation(actor="group-0", term=1)
STACK = Incarnation(actor="stack-0", term=1)
MIB = 1 << 20


def limit(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, operation="test", peer=str(GROUP))


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    with peer_processes() as starter:
        yield starter


@pytest.fixture
def client() -> Iterator[ZeroMqClient]:
    client = ZeroMqClient(STACK, digest=DIGEST)
    yield client
    client.close()


@pytest.fixture(params=["ipc", "tcp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    return {"socket_dir": tmp_path} if request.param == "ipc" else {"host": "127.0.0.1"}


def echo(client: ZeroMqClient, peer: Incarnation = GROUP) -> Message:
    pending = client.send(peer, Message(op="echo", arrays=(np.arange(8.0),)), lane=Lane.SERVE)
    return client.wait([pending], limit())[0]


def test_sigkill_with_a_full_queue_is_seen_at_once(
    start: Callable[..., Peer], client: ZeroMqClient, place: dict[str, object]
) -> None:
    peer = start(GROUP, **place)
    client.connect(GROUP, peer.endpoint, limit())
    peer.stop()
    message = Message(op="echo", arrays=(np.zeros(MIB, np.uint8),))
    pendings = [client.send(GROUP, message, lane=Lane.TRAIN) for _ in range(255)]
    with pytest.raises(CapacityError):
        client.send(GROUP, message, lane=Lane.TRAIN)
    started = time.perf_counter()
    peer.signal(signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        client.wait(pendings, limit())
    took_ms = (time.perf_counter() - started) * 1e3
    print(f"PeerLostError {took_ms:.1f} ms after SIGKILL with {len(pendings)} MiB queued")
    assert took_ms < 2_000
    assert caught.value.fields == {"peer": "group-0#1", "operation": "echo"}
    with pytest.raises(PeerLostError):
        client.send(GROUP, message, lane=Lane.SERVE)


def test_a_new_life_gets_none_of_the_old_messages(
    start: Callable[..., Peer], client: ZeroMqClient, tmp_path: Path
) -> None:
    first = start(GROUP, socket_dir=tmp_path)
    client.connect(GROUP, first.endpoint, limit())
    first.stop()
    old = [client.send(GROUP, Message(op="echo"), lane=Lane.SERVE) for _ in range(1500)]
    first.signal(signal.SIGKILL)
    first.process.join(20.0)
    reborn = Incarnation(actor=GROUP.actor, term=2)
    second = start(reborn, socket_dir=tmp_path)
    assert second.endpoint != first.endpoint
    client.connect(reborn, second.endpoint, limit())
    counted = Message(op="count")
    [reply] = client.wait([client.send(reborn, counted, lane=Lane.SERVE)], limit())
    assert reply.meta["requests"] == 1, "only our own has arrived"
    for pending in old:
        with pytest.raises(PeerLostError):
            client.wait([pending], limit())
    assert not Path(first.endpoint.removeprefix("ipc://")).exists()


def test_first_messages_to_a_slow_starter_are_not_lost(
    start: Callable[..., Peer], client: ZeroMqClient, place: dict[str, object]
) -> None:
    peer = start(GROUP, **place)
    peer.stop()
    with pytest.raises(DeadlineError):
        client.connect(GROUP, peer.endpoint, limit(0.2))
    with pytest.raises(PeerLostError):
        client.send(GROUP, Message(op="echo"), lane=Lane.SERVE)
    peer.signal(signal.SIGCONT)
    client.connect(GROUP, peer.endpoint, limit())
    pendings = [client.send(GROUP, Message(op="echo"), lane=Lane.SERVE) for _ in range(100)]
    assert len(client.wait(pendings, limit())) == 100


def test_sigstop_ends_at_the_deadline_and_the_late_reply_is_dropped(
    start: Callable[..., Peer], client: ZeroMqClient, place: dict[str, object]
) -> None:
    peer = start(GROUP, **place)
    client.connect(GROUP, peer.endpoint, limit())
    peer.stop()
    started = time.perf_counter()
    pending = client.send(GROUP, Message(op="echo", meta={"n": 1}), lane=Lane.SERVE)
    with pytest.raises(DeadlineError) as caught:
        client.wait([pending], limit(0.3))
    assert 0.3 <= time.perf_counter() - started < 1.3
    assert caught.value.fields == {"peer": "group-0#1", "operation": "echo", "deadline_s": 0.3}
    peer.signal(signal.SIGCONT)
    assert echo(client).arrays[0].sum() == 28
    assert client.dropped_replies == 1


def test_nobody_there(client: ZeroMqClient, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    for endpoint in (f"ipc://{tmp_path}/gone.sock", f"tcp://127.0.0.1:{free}"):
        started = time.perf_counter()
        with pytest.raises((PeerLostError, DeadlineError)):
            client.connect(GROUP, endpoint, limit(2.0))
        assert time.perf_counter() - started < 3.0
    with pytest.raises(TransportError, match="no address"):
        client.connect(GROUP, "nonsense", limit())


def test_ten_times_overload_stays_bounded(
    start: Callable[..., Peer], client: ZeroMqClient, tmp_path: Path
) -> None:
    lanes = LanesConfig(train=LaneConfig(credit_bytes=32 * MIB, min_share=0.1))
    peer = start(GROUP, lanes=lanes, socket_dir=tmp_path)
    client.connect(GROUP, peer.endpoint, limit())
    echo(client)
    base = peer.rss_bytes()
    busy = Message(
        op="spin", meta={"pieces": 2, "piece_s": 0.002}, arrays=(np.zeros(MIB, np.uint8),)
    )
    pendings, peak, refused = [], 0, 0
    for _ in range(320):
        try:
            pendings.append(client.send(GROUP, busy, lane=Lane.TRAIN))
        except CapacityError:
            refused += 1
            client.wait(pendings[:4], limit())
            del pendings[:4]
        peak = max(peak, peer.rss_bytes())
    client.wait(pendings, limit())
    print(f"peak RSS {(peak - base) / MIB:.0f} MiB over {base / MIB:.0f}, {refused} refused")
    assert refused > 0
    assert peak - base < 2 * 32 * MIB


def test_garbage_does_not_stop_the_server(client: ZeroMqClient, tmp_path: Path) -> None:
    server = ZeroMqServer(GROUP, serve, lanes=LanesConfig(), host="127.0.0.1", digest=DIGEST)
    try:
        client.connect(GROUP, server.endpoint, limit())
        dealer = client._channels[GROUP].dealer
        for frames in ([b""], [b"", b""], [b"\xff" * 100], [b"\4\0\0\0\x91\xc0\xc0\xc0"]):
            dealer.send_multipart(frames)
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert echo(client).op == "echo"
        assert server.malformed == 4
    finally:
        server.close()


def test_close_leaves_no_file_descriptor_thread_or_socket_file(tmp_path: Path) -> None:
    def cycle() -> None:
        server = ZeroMqServer(GROUP, serve, lanes=LanesConfig(), socket_dir=tmp_path, digest=DIGEST)
        client = ZeroMqClient(STACK, digest=DIGEST)
        client.connect(GROUP, server.endpoint, limit())
        big = Message(op="echo", arrays=(np.zeros(MIB, np.uint8),))
        client.wait([client.send(GROUP, big, lane=Lane.SERVE)], limit())
        client.disconnect(GROUP)
        client.connect(GROUP, server.endpoint, limit())
        client.close()
        server.close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    cycle()
    before = held()
    for _ in range(5):
        cycle()
    # Threads that were joined vanish from /proc a moment later.
    gone = limit(10.0)
    while held()[0] > before[0] or held()[1] > before[1]:
        gone.check(f"{held()} over {before}")
    assert list(tmp_path.iterdir()) == []


def test_long_socket_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="107"):
        ZeroMqServer(
            GROUP, serve, lanes=LanesConfig(), socket_dir=tmp_path / ("x" * 100), digest=DIGEST
        )


def test_importing_the_transport_starts_nothing() -> None:
    code = (
        "import threading, sys; import k3ray.transport.zeromq_client, "
        "k3ray.transport.zeromq_server, k3ray.transport.inprocess; "
        "assert threading.active_count() == 1; assert 'torch' not in sys.modules; "
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
