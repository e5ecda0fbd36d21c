"""The transport contract: lanes, control work, terms, closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import pytest
from transport_peers import DIGEST, serve
from transport_world import GROUP, STACK, Gate, World, ask, limit

from k3ray.config.supernode import LaneConfig, LanesConfig
from k3ray.errors import (
    CapacityError,
    DeadlineError,
    FencedError,
    HandshakeError,
    K3RayError,
    PeerLostError,
)
from k3ray.ids import Incarnation
from k3ray.transport.protocol import Lane, Message, Pending


def test_higher_lanes_overtake(world: World) -> None:
    served: list[str] = []
    arrived = threading.Event()

    def handler(message: Message) -> Generator[None, None, Message]:
        while message.op == "hold" and not arrived.is_set():
            yield
        served.append(message.op)
        return message

    no_shares = LanesConfig(
        serve=LaneConfig(min_share=0.0),
        score=LaneConfig(min_share=0.0),
        train=LaneConfig(min_share=0.0),
    )
    server, client = world.pair(handler, lanes=no_shares)
    pendings = [client.send(GROUP, Message(op="hold"), lane=Lane.SERVE)]
    for lane in (Lane.TRAIN, Lane.SCORE, Lane.SERVE, Lane.TRAIN, Lane.SCORE, Lane.SERVE):
        pendings.append(client.send(GROUP, Message(op=lane.name), lane=lane))
    waiting = limit(operation="arrival of 7 requests")
    while sum(counters.requests for counters in server.counters.values()) < 7:
        waiting.check()
    arrived.set()
    client.wait(pendings, limit())
    assert served == ["hold", "SERVE", "SERVE", "SCORE", "SCORE", "TRAIN", "TRAIN"]


def test_a_long_request_is_suspended_for_a_higher_lane(world: World) -> None:
    _, client = world.pair()
    slow = Message(op="spin", meta={"pieces": 150, "piece_s": 0.002})
    pending = client.send(GROUP, slow, lane=Lane.TRAIN)
    started = time.perf_counter()
    for _ in range(20):
        ask(client, "echo", lane=Lane.SERVE)
    assert not pending.done(), f"20 hops took {time.perf_counter() - started:.3f} s"
    assert client.wait([pending], limit())[0].op == "spun"


def test_no_lane_starves(world: World) -> None:
    """Beside a serve lane that is never empty, train moves on, and only a little (share 0.1).

    Counted where the work is done: this thread shares an interpreter with the worker and learns of
    replies late.
    """
    ended: list[str] = []

    def handler(message: Message) -> Generator[None, None, Message]:
        reply = yield from serve(message)
        ended.append(str(message.meta["lane"]))
        return reply

    _, client = world.pair(handler)

    def spin(lane: Lane, pieces: int, piece_s: float) -> Pending:
        meta = {"pieces": pieces, "piece_s": piece_s, "lane": lane.name}
        return client.send(GROUP, Message(op="spin", meta=meta), lane=lane)

    # The first piece holds the worker until all is queued, however slowly this thread runs.
    pendings = [spin(Lane.SERVE, 1, 1.0), *(spin(Lane.SERVE, 1, 0.002) for _ in range(400))]
    client.wait([*pendings, spin(Lane.TRAIN, 20, 0.002)], limit())
    num_served = ended.index("TRAIN")
    assert num_served < 401, "train waited for an empty serve lane"
    assert num_served >= 40, "train was not held back"


def test_run_in_worker(world: World) -> None:
    gate = Gate()
    server, client = world.pair(gate)
    assert server.run_in_worker(lambda: threading.current_thread().name, limit()) == (
        f"worker-{GROUP}"
    )
    assert server.run_in_worker(lambda: server.run_in_worker(lambda: 7, limit()), limit()) == 7
    with pytest.raises(TimeoutError, match="mine"):
        server.run_in_worker(lambda: (_ for _ in ()).throw(TimeoutError("mine")), limit())

    pending = client.send(GROUP, Message(op="hold"), lane=Lane.SERVE)
    assert gate.entered.wait(20.0)
    ran: list[int] = []
    with pytest.raises(DeadlineError, match="publish"):
        server.run_in_worker(lambda: ran.append(1), limit(0.05, "publish"))
    gate.open.set()
    client.wait([pending], limit())
    server.run_in_worker(lambda: ran.append(2), limit())
    assert ran == [2], "work that was given up never runs"
    server.close()
    with pytest.raises(PeerLostError):
        server.run_in_worker(lambda: 1, limit())


def test_lower_terms_are_fenced(world: World) -> None:
    server, old = world.pair()
    new = world.client(Incarnation(actor=STACK.actor, term=2))
    new.connect(GROUP, server.endpoint, limit())
    with pytest.raises(FencedError):
        ask(old, "echo")
    with pytest.raises(FencedError):
        world.client().connect(GROUP, server.endpoint, limit())
    assert ask(new, "echo").op == "echo"


def test_queued_requests_of_a_replaced_client_are_not_served(world: World) -> None:
    gate = Gate()
    server, old = world.pair(gate)
    old.send(GROUP, Message(op="hold"), lane=Lane.SERVE)
    assert gate.entered.wait(20.0)
    queued = old.send(GROUP, Message(op="n", meta={"name": "old"}), lane=Lane.TRAIN)
    opener = threading.Timer(0.1, gate.open.set)
    opener.start()
    new = world.client(Incarnation(actor=STACK.actor, term=2))
    new.connect(GROUP, server.endpoint, limit())
    with pytest.raises(FencedError):
        old.wait([queued], limit())
    assert "old" not in gate.served
    opener.join()


def test_another_life_of_the_server_is_refused(world: World) -> None:
    server = world.server()
    client = world.client()
    with pytest.raises(FencedError, match="found group-0#3"):
        client.connect(Incarnation(actor="group-0", term=4), server.endpoint, limit())
    with pytest.raises(FencedError):
        client.connect(GROUP, server.endpoint, limit())


def test_other_code_is_refused(world: World) -> None:
    server = world.server()
    client = world.client(digest="other")
    with pytest.raises(HandshakeError, match="protocol 1 with code other"):
        client.connect(GROUP, server.endpoint, limit())
    with pytest.raises(PeerLostError):
        ask(client, "echo")


def test_other_bits_are_refused(world: World) -> None:
    """The same code on another CPU: the numeric part of the digest differs."""
    server = world.server()
    client = world.client(digest=f"{DIGEST}/0123456789abcdef")
    with pytest.raises(HandshakeError, match="computes other bits"):
        client.connect(GROUP, server.endpoint, limit())


def test_closing_answers_what_waits(world: World) -> None:
    gate = Gate()
    server, client = world.pair(gate)
    held = client.send(GROUP, Message(op="hold"), lane=Lane.SERVE)
    assert gate.entered.wait(20.0)
    queued = client.send(GROUP, Message(op="n"), lane=Lane.TRAIN)
    closer = threading.Thread(target=server.close)
    closer.start()
    gate.open.set()
    for pending in (held, queued):
        with pytest.raises(PeerLostError) as caught:
            client.wait([pending], limit())
        assert caught.value.fields["peer"] == str(GROUP)
    closer.join(20.0)
    with pytest.raises(PeerLostError):
        client.send(GROUP, Message(op="n"), lane=Lane.SERVE)
    with pytest.raises(K3RayError):
        world.client().connect(GROUP, server.endpoint, limit(5.0))


def test_closed_twice(world: World) -> None:
    server, client = world.pair()
    pending = client.send(GROUP, Message(op="echo"), lane=Lane.SERVE)
    client.close()
    client.close()
    with pytest.raises(PeerLostError):
        client.wait([pending], limit())
    with pytest.raises(PeerLostError):
        client.send(GROUP, Message(op="echo"), lane=Lane.SERVE)
    server.close()
    server.close()


def test_many_short_lived_clients_do_not_use_up_the_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3ray.transport.admission.MAX_CHANNELS", 4)
    server = world.server()
    keeper = world.client(Incarnation(actor="keeper", term=1))
    keeper.connect(GROUP, server.endpoint, limit())
    for i in range(12):
        client = world.client(Incarnation(actor=f"c-{i}", term=1))
        retry = limit()
        while True:
            try:
                client.connect(GROUP, server.endpoint, limit())
                break
            except CapacityError:  # the server has not yet been told of the last departure
                retry.check()
        assert ask(client, "echo").op == "echo"
        client.close()
    assert ask(keeper, "echo").op == "echo"
