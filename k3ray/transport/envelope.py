"""What travels on a channel, before any encoding: `Up` to the server, `Down` to the client.

Both implementations exchange exactly these values; ZeroMQ encodes them (`wire`), in-process hands
them over. Everything going down names (incarnation, generation), so that a stray answer is
recognised and dropped. `check_message` is the door through which every message passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3ray.errors import K3RayError, TransportError
from k3ray.ids import Incarnation
from k3ray.transport.protocol import Lane, Message

HEADER_COST_BYTES = 256
"""Credit charged per request on top of its payload, so that empty requests are bounded too."""

MAX_IN_FLIGHT = 4096
"""Requests without a reply per channel; also what the sockets' high-water marks are made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First on every channel: who speaks, with which code, to whom it believes to speak."""

    protocol: int
    generation: int
    digest: str
    client: Incarnation
    server: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A message on a lane; `generation` is the client's channel number."""

    generation: int
    request_id: int
    lane: Lane
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The channel is open; `grants` are byte credits in the order of `Lane`."""

    server: Incarnation
    generation: int
    grants: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a request; gives `credit` bytes back."""

    server: Incarnation
    generation: int
    request_id: int
    credit: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A typed error in place of a reply; request id 0 refuses the handshake."""

    server: Incarnation
    generation: int
    request_id: int
    credit: int
    error: K3RayError


Up = Hello | Request
Down = Welcome | Reply | Failure


def message_cost(message: Message) -> int:
    """Credit bytes that a request uses until its reply."""
    return message.size_bytes + HEADER_COST_BYTES


def check_message(message: Message) -> None:
    """Refuse what cannot travel without a copy or a guess.

    Raises:
        TransportError: an array is not C-contiguous, holds objects or records, or a metadata
            value is not a str, int, float, bool or None.
    """
    for index, array in enumerate(message.arrays):
        if not array.flags.c_contiguous or array.dtype.kind in "OV" or not array.dtype.itemsize:
            raise TransportError(
                f"array {index} of {message.op} ({array.dtype}, shape {array.shape}) cannot travel",
                remedy="send C-contiguous arrays of plain numbers",
                operation=message.op,
            )
    for name, value in message.meta.items():
        if value is not None and not isinstance(value, (str, int, float)):
            raise TransportError(
                f"metadata {name} of {message.op} is a {type(value).__name__}",
                remedy="send str, int, float, bool or None; tensors go into arrays",
                operation=message.op,
            )
