"""The narrow door between processes that exchange tensors: messages, lanes, client, server.

A request carries an operation name, small msgpack-able metadata and raw contiguous arrays. The
reply matches (incarnation, request id, generation) or is dropped. Implementations: `inprocess`
(zero copies) and `zeromq` (ipc, tcp); both pass the same contract tests. Handlers are generators:
they yield between pieces of at most a few milliseconds so that a higher lane can run in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from k3ray.clock import Deadline
from k3ray.ids import Incarnation

Array = npt.NDArray[np.generic]
Meta = Mapping[str, str | int | float | bool | None]

PROTOCOL_VERSION = 1


class Lane(IntEnum):
    """Priority of a message at a group; lower is served first."""

    SERVE = 0
    SCORE = 1
    TRAIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One request or reply: operation, metadata, C-contiguous arrays (numbers, bools, times).

    Nothing is copied: the arrays of a sent message must not change until the reply has arrived
    (those of a reply: never), and received arrays are read-only.
    """

    op: str
    meta: Meta = field(default_factory=dict)
    arrays: tuple[Array, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Payload bytes, the unit of credits."""
        return sum([array.nbytes for array in self.arrays])


Handler = Callable[[Message], Generator[None, None, Message]]
"""Serves one request; yields between short pieces of work; returns the reply; may raise a
`K3RayError`, which reaches the client as the same typed error."""


class Pending(Protocol):
    """A request in flight."""

    @property
    def peer(self) -> Incarnation:
        """Who has to answer."""
        ...

    def done(self) -> bool:
        """Whether a reply or an error has arrived."""
        ...


class Client(Protocol):
    """Client side; one per thread of use. Every call that waits takes a deadline."""

    def connect(self, peer: Incarnation, endpoint: str, deadline: Deadline) -> None:
        """Open a channel and shake hands (protocol version, code and numeric digest, term).

        Raises:
            HandshakeError: other protocol or code.
            FencedError: the peer has seen a higher term of this client, or is itself stale.
            DeadlineError, PeerLostError: no answer.
        """
        ...

    def send(self, peer: Incarnation, message: Message, *, lane: Lane) -> Pending:
        """Queue a request; never blocks.

        Raises:
            CapacityError: the byte credits of this lane at that peer are used up.
            PeerLostError: the channel is down.
        """
        ...

    def wait(self, pendings: Sequence[Pending], deadline: Deadline) -> list[Message]:
        """Replies in the order of `pendings`; raises the first typed error, `DeadlineError` or
        `PeerLostError` (as soon as the peer's death is seen, not at the deadline).

        After another error the remaining pendings can be waited for again. A deadline gives up
        every pending that is unanswered: it stays failed, its late reply is dropped.
        """
        ...

    def wait_any(self, pendings: Sequence[Pending], deadline: Deadline) -> bool:
        """Whether one of `pendings` is done (a reply or an error) by the deadline; none is given
        up."""
        ...

    def disconnect(self, peer: Incarnation) -> None:
        """Close the channel; late replies are dropped."""
        ...

    def close(self) -> None:
        """Close all channels; idempotent."""
        ...


class Server(Protocol):
    """Server side of one incarnation."""

    @property
    def endpoint(self) -> str:
        """Where clients connect; unique to this incarnation, never reused."""
        ...

    def run_in_worker(self, work: Callable[[], object], deadline: Deadline) -> object:
        """Run `work` on the worker thread and return its result (control ops of the owner: load
        a version, publish, prepare, apply). It runs between two pieces, so requests that have
        yielded may be suspended meanwhile."""
        ...

    def close(self) -> None:
        """Stop threads and remove the endpoint; idempotent."""
        ...
