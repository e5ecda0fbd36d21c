"""Codec between envelopes and ZeroMQ frames: a msgpack header, then one raw frame per array.

Sending keeps references to the arrays' memory (no copy above 64 KiB); receiving returns read-only
views into the frames. Errors travel as (code, message, remedy, fields), never as a pickle or a
traceback. `decode_*` raises `TransportError` on anything that is not well formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import msgpack
import numpy as np

from k3ray.errors import K3RayError, TransportError
from k3ray.ids import Incarnation
from k3ray.transport.envelope import (
    Down,
    Failure,
    Hello,
    Reply,
    Request,
    Up,
    Welcome,
    check_message,
)
from k3ray.transport.protocol import Array, Lane, Message

_HELLO, _REQUEST, _WELCOME, _REPLY, _FAILURE = range(5)

Frame = bytes | memoryview
"""Bytes of one ZeroMQ frame."""


def encode_up(item: Up) -> list[Frame]:
    """Frames of a handshake or request.

    Raises:
        TransportError: the message cannot travel (see `check_message`).
    """
    match item:
        case Hello():
            # The version comes first: this much of the layout is the same in every version.
            header: list[Any] = [_HELLO, item.protocol, item.generation, item.digest,
                                 str(item.client), str(item.server)]  # fmt: skip
            return [_pack(header, "handshake")]
        case Request():
            body, frames = _encode_message(item.message)
            header = [_REQUEST, item.generation, item.request_id, int(item.lane), *body]
            return [_pack(header, item.message.op), *frames]


def encode_down(item: Down) -> list[Frame]:
    """Frames of a welcome, reply or failure; raises as `encode_up`."""
    match item:
        case Welcome():
            header: list[Any] = [_WELCOME, str(item.server), item.generation, list(item.grants)]
            return [_pack(header, "welcome")]
        case Reply():
            body, frames = _encode_message(item.message)
            header = [_REPLY, str(item.server), item.generation, item.request_id, item.credit,
                      *body]  # fmt: skip
            return [_pack(header, item.message.op), *frames]
        case Failure():
            header = [_FAILURE, str(item.server), item.generation, item.request_id, item.credit,
                      *_encode_error(item.error)]  # fmt: skip
            return [_pack(header, "failure")]


class Malformed(NamedTuple):
    """A request whose header is sound but whose arrays are not: it can still be refused."""

    generation: int
    request_id: int
    lane: Lane
    size_bytes: int
    error: TransportError


def decode_up(frames: Sequence[memoryview]) -> Up | Malformed:
    """Inverse of `encode_up`.

    Raises:
        TransportError: the header itself cannot be understood.
    """
    kind, header = _header(frames)
    try:
        if kind == _HELLO:
            protocol, generation, digest, client, server = header[:5]
            return Hello(
                protocol=int(protocol), generation=int(generation), digest=str(digest),
                client=Incarnation.parse(client), server=Incarnation.parse(server),
            )  # fmt: skip
        if kind == _REQUEST:
            generation, request_id, lane = int(header[0]), int(header[1]), Lane(header[2])
            try:
                message = _decode_message(header[3:], frames[1:])
            except TransportError as error:
                size = sum(frame.nbytes for frame in frames[1:])
                return Malformed(generation, request_id, lane, size, error)
            return Request(generation=generation, request_id=request_id, lane=lane, message=message)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise _not_understood() from error
    raise _not_understood()


def decode_down(frames: Sequence[memoryview]) -> Down:
    """Inverse of `encode_down`; raises `TransportError` on malformed frames."""
    kind, header = _header(frames)
    try:
        server, generation = Incarnation.parse(header[0]), int(header[1])
        if kind == _WELCOME:
            grants = tuple(int(grant) for grant in header[2])
            return Welcome(server=server, generation=generation, grants=grants)
        request_id, credit = int(header[2]), int(header[3])
        if kind == _REPLY:
            return Reply(
                server=server, generation=generation, request_id=request_id, credit=credit,
                message=_decode_message(header[4:], frames[1:]),
            )  # fmt: skip
        if kind == _FAILURE:
            return Failure(
                server=server, generation=generation, request_id=request_id, credit=credit,
                error=_decode_error(*header[4:8]),
            )  # fmt: skip
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise _not_understood() from error
    raise _not_understood()


def _encode_message(message: Message) -> tuple[list[Any], list[Frame]]:
    check_message(message)
    shapes = [[array.dtype.str, array.shape] for array in message.arrays]
    # A byte view, because not every dtype (datetime64) exports a buffer of its own.
    frames: list[Frame] = [array.reshape(-1).view(np.uint8).data for array in message.arrays]
    return [message.op, dict(message.meta), shapes], frames


def _decode_message(body: Sequence[Any], frames: Sequence[memoryview]) -> Message:
    op, meta, shapes = body[:3]
    if len(shapes) != len(frames):
        raise TransportError(
            f"{op} announces {len(shapes)} arrays and carries {len(frames)}",
            remedy="update the peer: it speaks another wire format",
            operation=op,
        )
    arrays = tuple(
        _decode_array(op, dtype, tuple(shape), frame)
        for (dtype, shape), frame in zip(shapes, frames, strict=True)
    )
    return Message(op=op, meta=meta, arrays=arrays)


def _decode_array(op: str, code: str, shape: tuple[int, ...], frame: memoryview) -> Array:
    dtype = np.dtype(code)
    if dtype.hasobject or min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != frame.nbytes:
        raise TransportError(
            f"an array of {op} is announced as {code} {shape} but has {frame.nbytes} bytes",
            remedy="update the peer: it speaks another wire format",
            operation=op,
        )
    if frame.nbytes == 0:
        return np.empty(shape, dtype)
    array = np.frombuffer(frame, dtype).reshape(shape)
    if not array.flags.aligned:
        # Small frames share libzmq's 8 KiB receive buffer at any offset; torch wants alignment.
        array = array.copy()
    array.flags.writeable = False
    return array


def _pack(header: list[Any], operation: str) -> bytes:
    try:
        packed: bytes = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise TransportError(
            f"the metadata of {operation} cannot be encoded: {error}",
            remedy="integers must fit 64 bits",
            operation=operation,
        ) from error
    return packed


def _header(frames: Sequence[memoryview]) -> tuple[int, list[Any]]:
    try:
        kind, *header = msgpack.unpackb(frames[0], strict_map_key=False)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise _not_understood() from error
    return kind, header


def _not_understood() -> TransportError:
    return TransportError(
        "a message could not be understood",
        remedy="only k3ray processes of one version may connect to this endpoint",
    )


def _encode_error(error: K3RayError) -> list[Any]:
    fields = {name: _packable(value) for name, value in error.fields.items()}
    return [error.code, error.message, error.remedy, fields]


def _packable(value: Any) -> Any:
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError):
        return repr(value)
    return value


def _decode_error(code: str, message: str, remedy: str, fields: dict[str, Any]) -> K3RayError:
    for kind in _error_classes(K3RayError):
        if kind.code == code:
            return kind(message, remedy=remedy, **fields)
    return TransportError(f"{code}: {message}", remedy=remedy, **fields)


def _error_classes(root: type[K3RayError]) -> Iterator[type[K3RayError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _error_classes(kind)
