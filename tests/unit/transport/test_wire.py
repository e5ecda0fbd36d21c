from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from k3ray.errors import CapacityError, K3RayError, TransportError
from k3ray.ids import Incarnation
from k3ray.transport.envelope import Failure, Hello, Reply, Request, Welcome
from k3ray.transport.protocol import Lane, Message
from k3ray.transport.wire import (
    Malformed,
    decode_down,
    decode_up,
    encode_down,
    encode_up,
)

GROUP = Incarnation(actor="group-0", term=3)
DTYPES = st.sampled_from(["f4", "f8", "i4", "i8", "u2", "u1", "?", "c16", ">f4"])
ARRAYS = hnp.arrays(dtype=DTYPES, shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=60))
META = st.dictionaries(
    st.text(max_size=8),
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats(),
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(op=st.text(max_size=10), meta=META, arrays=st.lists(ARRAYS, max_size=6))
def test_messages_round_trip(op: str, meta: dict[str, int], arrays: list[np.ndarray]) -> None:
    message = Message(op=op, meta=meta, arrays=tuple(arrays))
    frames = encode_up(Request(generation=2, request_id=7, lane=Lane.TRAIN, message=message))
    up = decode_up([bytes(frame) for frame in frames])
    assert isinstance(up, Request)
    assert (up.generation, up.request_id, up.lane) == (2, 7, Lane.TRAIN)
    reply = Reply(server=GROUP, generation=2, request_id=7, credit=5, message=message)
    down = decode_down([bytes(frame) for frame in encode_down(reply)])
    assert isinstance(down, Reply)
    assert (down.server, down.generation, down.request_id, down.credit) == (GROUP, 2, 7, 5)
    for decoded in (up.message, down.message):
        assert decoded.op == op
        assert repr(dict(decoded.meta)) == repr(meta)
        assert [a.tobytes() for a in decoded.arrays] == [a.tobytes() for a in arrays]
        assert [(a.dtype, a.shape) for a in decoded.arrays] == [(a.dtype, a.shape) for a in arrays]


def test_handshake_round_trips() -> None:
    hello = Hello(protocol=1, generation=4, digest="d", client=GROUP, server=GROUP)
    assert decode_up([bytes(f) for f in encode_up(hello)]) == hello
    welcome = Welcome(server=GROUP, generation=4, grants=(1, 2, 3))
    assert decode_down([bytes(f) for f in encode_down(welcome)]) == welcome


def test_errors_keep_class_and_plain_fields() -> None:
    error = CapacityError("full", remedy="wait", retry_after_s=0.5, where=GROUP, big=2**70)
    failure = Failure(server=GROUP, generation=1, request_id=2, credit=3, error=error)
    down = decode_down([bytes(f) for f in encode_down(failure)])
    assert isinstance(down, Failure)
    assert type(down.error) is CapacityError
    assert (down.error.message, down.error.remedy) == ("full", "wait")
    assert down.error.fields == {"retry_after_s": 0.5, "where": repr(GROUP), "big": repr(2**70)}


def test_an_unknown_error_code_becomes_a_transport_error() -> None:
    class LocalError(K3RayError):
        code = "local"

    failure = Failure(
        server=GROUP, generation=1, request_id=2, credit=3, error=LocalError("m", a=1)
    )
    frames = [bytes(f).replace(b"local", b"other") for f in encode_down(failure)]
    down = decode_down(frames)
    assert isinstance(down, Failure)
    assert type(down.error) is TransportError
    assert down.error.fields == {"a": 1}


@given(frames=st.lists(st.binary(max_size=80), max_size=3))
def test_garbage_is_refused(frames: list[bytes]) -> None:
    for decode in (decode_up, decode_down):
        with pytest.raises(TransportError):
            decode(frames)


@given(cut=st.integers(0, 400), flip=st.integers(0, 255))
def test_a_damaged_request_never_raises_anything_else(cut: int, flip: int) -> None:
    message = Message(op="forward", arrays=(np.arange(40.0), np.zeros(40_000)))
    head, big = (
        bytes(f)
        for f in encode_up(Request(generation=1, request_id=1, lane=Lane.SERVE, message=message))
    )
    damaged = bytearray(head)
    damaged[cut % len(head)] = flip
    for frames in ([bytes(damaged), big], [head[:cut], big], [head], [head, big[:-1]], []):
        try:
            decode_up(frames)
        except TransportError:
            continue


def test_missing_arrays_can_still_be_refused_by_name() -> None:
    message = Message(op="forward", arrays=(np.zeros(40_000),))
    head, _ = encode_up(Request(generation=1, request_id=9, lane=Lane.SCORE, message=message))
    item = decode_up([bytes(head)])
    assert isinstance(item, Malformed)
    assert (item.generation, item.request_id, item.lane) == (1, 9, Lane.SCORE)


def test_integers_beyond_64_bits_are_refused() -> None:
    message = Message(op="x", meta={"n": 2**70})
    with pytest.raises(TransportError, match="64 bits"):
        encode_up(Request(generation=1, request_id=1, lane=Lane.SERVE, message=message))
    assert msgpack.packb(2**63)
