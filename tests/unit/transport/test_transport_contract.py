"""The transport contract: arrays, order, late replies, errors, credits."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from transport_world import GROUP, SMALL_LANES, Gate, World, ask, limit

from k3ray.errors import (
    CapacityError,
    DeadlineError,
    PeerLostError,
    StaleVersionError,
    TransportError,
)
from k3ray.ids import Incarnation
from k3ray.transport.protocol import Lane, Message
from k3ray.transport.torch_codec import from_array, to_array

DTYPES = ["f4", "f8", "f2", "i4", "i8", "u1", "u2", "?", "c8", "c16", ">i4", "M8[ns]", "S3", "U2"]


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1, 7, 1), (0,), (4, 0, 2), (1023,)])
def test_arrays_keep_dtype_shape_and_bytes(world: World, shape: tuple[int, ...]) -> None:
    _, client = world.pair()
    rng = np.random.default_rng(0)
    arrays = [
        np.frombuffer(
            rng.integers(0, 2, int(np.prod(shape)) * np.dtype(d).itemsize, np.uint8).tobytes(), d
        ).reshape(shape)
        if np.prod(shape)
        else np.empty(shape, d)
        for d in DTYPES
    ]
    reply = ask(client, "echo", *arrays, layer=3, version="main@1", ratio=0.5, last=True, none=None)
    assert reply.meta == {
        "layer": 3, "version": "main@1", "ratio": 0.5, "last": True, "none": None,
    }  # fmt: skip
    for sent, received in zip(arrays, reply.arrays, strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert received.tobytes() == sent.tobytes()
        assert received.flags.c_contiguous
        assert received.flags.aligned
        assert not received.flags.writeable


@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 65_535, 65_537, 1_000_003])
def test_odd_sizes_around_the_inline_limits(world: World, size: int) -> None:
    _, client = world.pair()
    sent = [np.random.default_rng(i).integers(0, 255, size, np.uint8) for i in range(6)]
    reply = ask(client, "echo", *sent, np.arange(3.0))
    for array, received in zip([*sent, np.arange(3.0)], reply.arrays, strict=True):
        np.testing.assert_array_equal(received, array)


def test_64_megabytes(world: World) -> None:
    _, client = world.pair()
    array = np.arange(16_000_000, dtype=np.float32)
    reply = ask(client, "echo", array)
    np.testing.assert_array_equal(reply.arrays[0], array)


def test_in_process_copies_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, client = World(kind="inprocess", socket_dir=tmp_path, stack=stack).pair()
        array = np.arange(10.0)
        assert np.shares_memory(ask(client, "echo", array).arrays[0], array)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_torch_tensors_travel(world: World, dtype: torch.dtype) -> None:
    _, client = world.pair()
    tensor = torch.arange(15).reshape(3, 5).to(dtype)
    array = to_array(tensor)
    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    received = ask(client, "echo", array).arrays[0]
    back = from_array(received, dtype=dtype)
    assert back.data_ptr() == received.__array_interface__["data"][0]
    assert torch.equal(back, tensor)
    assert from_array(np.empty((0, 4), np.float32)).shape == (0, 4)


def test_many_in_flight_come_back_in_order(world: World) -> None:
    gate = Gate()
    gate.open.set()
    _, client = world.pair(gate)
    pendings = [
        client.send(
            GROUP, Message(op="n", meta={"name": i}, arrays=(np.full(50, i),)), lane=Lane.SERVE
        )
        for i in range(1000)
    ]
    assert all(pending.peer == GROUP for pending in pendings)
    replies = client.wait(list(reversed(pendings)), limit())
    assert [reply.meta["name"] for reply in replies] == list(range(999, -1, -1))
    assert all(pending.done() for pending in pendings)
    assert gate.served == [str(i) for i in range(1000)]


def test_one_client_of_two_servers(world: World) -> None:
    other = Incarnation(actor="group-1", term=1)
    server, client = world.pair()
    client.connect(other, world.server(me=other).endpoint, limit())
    message = Message(op="echo", arrays=(np.arange(4),))
    pendings = [client.send(peer, message, lane=Lane.SERVE) for peer in (GROUP, other)]
    assert len(client.wait(pendings, limit())) == 2
    late = client.send(other, message, lane=Lane.SERVE)
    server.close()
    with pytest.raises(PeerLostError) as caught:
        client.wait([client.send(GROUP, message, lane=Lane.SERVE), late], limit())
    assert caught.value.fields["peer"] == str(GROUP)
    assert len(client.wait([late], limit())) == 1, "the other peer's reply is still there"


def test_late_reply_is_dropped(world: World) -> None:
    gate = Gate()
    _, client = world.pair(gate, lanes=SMALL_LANES)
    pending = client.send(GROUP, Message(op="hold"), lane=Lane.SERVE)
    with pytest.raises(DeadlineError) as caught:
        client.wait([pending], limit(0.05))
    assert caught.value.fields == {"peer": str(GROUP), "operation": "hold", "deadline_s": 0.05}
    assert str(GROUP) in str(caught.value)
    assert "hold" in str(caught.value)
    gate.open.set()
    assert ask(client, "after").op == "after"
    assert client.dropped_replies == 1
    with pytest.raises(DeadlineError):
        client.wait([pending], limit())


def test_reply_to_an_earlier_generation_is_dropped(world: World) -> None:
    gate = Gate()
    server, client = world.pair(gate)
    old = client.send(GROUP, Message(op="hold", meta={"name": "old"}), lane=Lane.SERVE)
    assert gate.entered.wait(20.0)
    client.disconnect(GROUP)
    gate.open.set()
    client.connect(GROUP, server.endpoint, limit())
    assert ask(client, "echo", name="new").meta["name"] == "new"
    with pytest.raises(PeerLostError):
        client.wait([old], limit())


def test_typed_errors_keep_their_fields(world: World) -> None:
    _, client = world.pair()
    with pytest.raises(StaleVersionError) as caught:
        ask(client, "fail")
    assert caught.value.message == "version main@3 is not live"
    assert caught.value.remedy == "use main@4"
    assert caught.value.fields == {"version": "main@3", "live": [4]}


def test_unknown_errors_become_transport_errors_without_payload(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    _, client = world.pair()
    with pytest.raises(TransportError, match="ZeroDivisionError") as caught:
        ask(client, "crash")
    assert caught.value.fields["error"] == "ZeroDivisionError"
    assert "secret" not in f"{caught.value} {caught.value.fields}"
    assert ask(client, "echo").op == "echo", "the worker lives on"


def test_a_reply_that_cannot_travel_is_an_error(world: World) -> None:
    _, client = world.pair()
    with pytest.raises(TransportError, match="cannot travel"):
        ask(client, "bad-reply")
    assert ask(client, "echo").op == "echo"


@pytest.mark.parametrize(
    "message",
    [
        Message(op="x", arrays=(np.zeros((4, 4))[:, ::2],)),
        Message(op="x", arrays=(np.array([None], dtype=object),)),
        Message(op="x", meta={"list": [1, 2]}),  # type: ignore[dict-item]
    ],
    ids=["strided", "object", "meta"],
)
def test_what_cannot_travel_is_refused_and_costs_no_credit(world: World, message: Message) -> None:
    _, client = world.pair(lanes=SMALL_LANES)
    for _ in range(100):
        with pytest.raises(TransportError, match="x"):
            client.send(GROUP, message, lane=Lane.SERVE)
    assert ask(client, "echo", np.zeros(9_000, np.uint8)).arrays[0].nbytes == 9_000


def test_credits_run_out_and_recover(world: World) -> None:
    gate = Gate()
    _, client = world.pair(gate, lanes=SMALL_LANES)
    message = Message(op="hold", arrays=(np.zeros(3_000, np.uint8),))
    pendings = [client.send(GROUP, message, lane=Lane.SERVE) for _ in range(3)]
    with pytest.raises(CapacityError) as caught:
        client.send(GROUP, message, lane=Lane.SERVE)
    assert caught.value.fields["retry_after_s"] > 0
    other_lane = client.send(GROUP, message, lane=Lane.TRAIN)
    gate.open.set()
    client.wait([*pendings, other_lane], limit())
    for _ in range(10):
        client.wait([client.send(GROUP, message, lane=Lane.SERVE)], limit())
    with pytest.raises(CapacityError, match=r"lanes\.serve\.credit_bytes") as caught:
        client.send(
            GROUP, Message(op="echo", arrays=(np.zeros(20_000, np.uint8),)), lane=Lane.SERVE
        )
    assert "retry_after_s" not in caught.value.fields


def test_overload_is_refused_at_the_bound(world: World) -> None:
    gate = Gate()
    server, client = world.pair(gate, lanes=SMALL_LANES)
    message = Message(op="hold", arrays=(np.zeros(1_000, np.uint8),))
    pendings, refused = [], 0
    for _ in range(10 * SMALL_LANES.train.credit_bytes // 1_000):
        try:
            pendings.append(client.send(GROUP, message, lane=Lane.TRAIN))
        except CapacityError:
            refused += 1
    assert len(pendings) == SMALL_LANES.train.credit_bytes // 1_256
    assert refused == 500 - len(pendings)
    gate.open.set()
    client.wait(pendings, limit())
    counters = server.counters[Lane.TRAIN]
    assert (counters.requests, counters.bytes_in) == (len(pendings), 1_000 * len(pendings))
    assert counters.bytes_out == counters.bytes_in
    assert counters.busy_s > 0


def test_waiting_for_any_gives_up_none(world: World) -> None:
    gate = Gate()
    _, client = world.pair(gate)
    held = client.send(GROUP, Message(op="hold"), lane=Lane.SERVE)
    assert not client.wait_any([held], limit(0.05))
    assert not client.wait_any([held], limit(0.0))
    assert not held.done()
    other = client.send(GROUP, Message(op="echo"), lane=Lane.SERVE)
    gate.open.set()
    assert client.wait_any([held, other], limit())
    assert [reply.op for reply in client.wait([held, other], limit())] == ["hold", "echo"]
    assert client.wait_any([other, held], limit(0.0)), "one that is done needs no wait"


def test_waiting_for_any_ends_with_the_peer(world: World) -> None:
    gate = Gate()
    _, client = world.pair(gate)
    held = client.send(GROUP, Message(op="hold"), lane=Lane.SERVE)
    client.disconnect(GROUP)
    assert client.wait_any([held], limit())
    gate.open.set()
    with pytest.raises(PeerLostError):
        client.wait([held], limit())
