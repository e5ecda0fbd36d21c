"""Codec between envelopes and ZeroMQ frames.

Frame 0 is [u32 header length, msgpack header, small arrays], each part at a multiple of 16 bytes;
every larger array is a raw frame of its own, sent from and received into memory without a copy.
Small ones ride along because a frame costs more than the copy of its 16 KiB. Errors travel as
(code, message, remedy, fields), never as a pickle or a traceback. `decode_*` raises
`TransportError` on anything that is not well formed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
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

_parse_incarnation = functools.lru_cache(maxsize=1024)(Incarnation.parse)
_LENGTH = struct.Struct("<I")
_ALIGN = 16
_INLINE_BYTES = 16 * 1024
_INLINE_TOTAL_BYTES = 64 * 1024

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
            header = [_REQUEST, item.generation, item.request_id, int(item.lane)]
            return _encode_message(header, item.message)


def encode_down(item: Down) -> list[Frame]:
    """Frames of a welcome, reply or failure; raises as `encode_up`."""
    match item:
        case Welcome():
            header: list[Any] = [_WELCOME, str(item.server), item.generation, list(item.grants)]
            return [_pack(header, "welcome")]
        case Reply():
            header = [_REPLY, str(item.server), item.generation, item.request_id, item.credit]
            return _encode_message(header, item.message)
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


def decode_up(frames: Sequence[Frame]) -> Up | Malformed:
    """Inverse of `encode_up`; frame 0 as `bytes`, whose memory is aligned.

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
                message = _decode_message(header[3:], frames)
            except TransportError as error:
                size = sum(len(frame) for frame in frames)
                return Malformed(generation, request_id, lane, size, error)
            return Request(generation=generation, request_id=request_id, lane=lane, message=message)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise _not_understood() from error
    raise _not_understood()


def decode_down(frames: Sequence[Frame]) -> Down:
    """Inverse of `encode_down`; raises `TransportError` on malformed frames."""
    kind, header = _header(frames)
    try:
        server, generation = _parse_incarnation(header[0]), int(header[1])
        if kind == _WELCOME:
            grants = tuple(int(grant) for grant in header[2])
            return Welcome(server=server, generation=generation, grants=grants)
        request_id, credit = int(header[2]), int(header[3])
        if kind == _REPLY:
            return Reply(
                server=server, generation=generation, request_id=request_id, credit=credit,
                message=_decode_message(header[4:], frames),
            )  # fmt: skip
        if kind == _FAILURE:
            return Failure(
                server=server, generation=generation, request_id=request_id, credit=credit,
                error=_decode_error(*header[4:8]),
            )  # fmt: skip
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise _not_understood() from error
    raise _not_understood()


def _encode_message(header: list[Any], message: Message) -> list[Frame]:
    """`header` + [op, meta, [[dtype, shape, inline offset or -1], ...]], then the arrays."""
    check_message(message)
    inline: list[bytes] = []
    frames: list[Frame] = []
    specs = []
    offset = 0
    for array in message.arrays:
        size = array.nbytes
        if size <= _INLINE_BYTES and offset + size <= _INLINE_TOTAL_BYTES:
            specs.append((array.dtype.str, array.shape, offset))
            inline += (array.tobytes(), bytes(-size % _ALIGN))
            offset += size + -size % _ALIGN
        else:
            specs.append((array.dtype.str, array.shape, -1))
            # A byte view, because not every dtype (datetime64) exports a buffer of its own.
            frames.append(array.reshape(-1).view(np.uint8).data)
    header += (message.op, dict(message.meta), specs)
    return [_pack(header, message.op, inline), *frames]


def _decode_message(body: Sequence[Any], frames: Sequence[Frame]) -> Message:
    op, meta, specs = body[:3]
    head, *rest = frames
    start = _data_start(head)
    arrays = []
    try:
        for code, shape, offset in specs:
            # Checks dtype, shape and that the buffer is large enough.
            if offset < 0:
                arrays.append(_own_frame(code, shape, rest.pop(0)))
            else:
                arrays.append(np.ndarray(shape, np.dtype(code), head, start + offset))
    except (TypeError, ValueError, IndexError) as error:
        raise TransportError(
            f"the arrays of {op} do not match their announcement",
            remedy="update the peer: it speaks another wire format",
            operation=op,
        ) from error
    return Message(op=op, meta=meta, arrays=tuple(arrays))


def _own_frame(code: str, shape: Sequence[int], frame: Frame) -> Array:
    array: Array = np.ndarray(shape, np.dtype(code), frame)
    if array.nbytes != len(frame):
        raise ValueError("the frame is longer than its array")
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


def _pack(header: list[Any], operation: str, inline: Sequence[bytes] = ()) -> bytes:
    try:
        packed: bytes = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise TransportError(
            f"the metadata of {operation} cannot be encoded: {error}",
            remedy="integers must fit 64 bits",
            operation=operation,
        ) from error
    padding = bytes(-(_LENGTH.size + len(packed)) % _ALIGN)
    return b"".join((_LENGTH.pack(len(packed)), packed, padding, *inline))


def _header(frames: Sequence[Frame]) -> tuple[int, list[Any]]:
    try:
        (length,) = _LENGTH.unpack_from(frames[0])
        packed = frames[0][_LENGTH.size : _LENGTH.size + length]
        kind, *header = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, TypeError, IndexError, struct.error, msgpack.UnpackException) as error:
        raise _not_understood() from error
    return kind, header


def _data_start(head: Frame) -> int:
    (length,) = _LENGTH.unpack_from(head)
    end = _LENGTH.size + int(length)
    return end + -end % _ALIGN


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
