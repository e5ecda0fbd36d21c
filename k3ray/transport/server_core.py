"""What a server does with envelopes, whatever carries them: admit, serve by lanes, answer.

Runs on the worker thread only and owns no thread or socket. The owner feeds `receive` with what
arrived and calls `step`, which runs one piece of the most urgent request. Feeding between any two
pieces is what lets a higher lane overtake; an answer therefore proves that the worker is alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass

from k3ray.config.supernode import LanesConfig
from k3ray.errors import FencedError, K3RayError, PeerLostError, TransportError
from k3ray.ids import Incarnation
from k3ray.transport.admission import Admission, ClientChannel
from k3ray.transport.envelope import (
    HEADER_COST_BYTES,
    Down,
    Failure,
    Hello,
    Reply,
    Request,
    Welcome,
    message_cost,
)
from k3ray.transport.lanes import LaneScheduler
from k3ray.transport.protocol import Handler, Lane, Message
from k3ray.transport.wire import Malformed

_log = logging.getLogger("k3ray.transport")

Transmit = Callable[[Hashable, Down], bool]
"""Hands an envelope to the client of this identity; False when that client is gone."""


@dataclass(slots=True, kw_only=True)
class LaneCounters:
    """What one lane has done since the server started."""

    requests: int = 0
    errors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    busy_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Job:
    channel: ClientChannel
    request_id: int
    lane: Lane
    message: Message
    cost: int
    run: Generator[None, None, Message] | None = None


class ServerCore:
    """Requests of one server incarnation.

    Args:
        me: This server.
        handler: Serves one request; see `Handler`.
        lanes: Credits, shares and quantum.
        digest: What clients must present (`process_digest`).
        transmit: Sends down.
    """

    def __init__(
        self,
        me: Incarnation,
        handler: Handler,
        *,
        lanes: LanesConfig,
        digest: str,
        transmit: Transmit,
    ) -> None:
        self._me = me
        self._handler = handler
        self._transmit = transmit
        self._admission = Admission(me, lanes=lanes, digest=digest)
        self._jobs: LaneScheduler[_Job] = LaneScheduler(lanes)
        self._counters = {lane: LaneCounters() for lane in Lane}

    @property
    def counters(self) -> Mapping[Lane, LaneCounters]:
        """Live counters by lane; read only."""
        return self._counters

    def has_work(self) -> bool:
        """Whether `step` would run something."""
        return len(self._jobs) > 0

    def receive(self, identity: Hashable, item: Hello | Request | Malformed) -> None:
        """Admit or refuse what arrived; serves nothing yet."""
        match item:
            case Hello():
                self._receive_hello(identity, item)
            case Malformed():
                cost = item.size_bytes + HEADER_COST_BYTES
                self._refuse(identity, item.generation, item.request_id, cost, item.error)
            case Request():
                self._receive_request(identity, item)

    def step(self) -> None:
        """Run one piece of the most urgent request."""
        picked = self._jobs.pop()
        if picked is None:
            return
        lane, job = picked
        if not self._admission.is_current(job.channel):
            self._drop(job, FencedError(
                f"{job.channel.client} was replaced while {job.message.op} waited at {self._me}",
                remedy="the caller must exit",
                peer=str(self._me),
                operation=job.message.op,
            ))  # fmt: skip
            return
        started_s = time.monotonic()
        outcome = self._advance(job)
        busy_s = time.monotonic() - started_s
        self._jobs.charge(lane, busy_s)
        self._counters[lane].busy_s += busy_s
        if outcome is None:
            self._jobs.put_back(lane, job)
        else:
            self._answer(job, outcome)

    def shutdown(self) -> None:
        """Answer everything that waits with `PeerLostError` and run nothing more."""
        while (picked := self._jobs.pop()) is not None:
            _, job = picked
            self._drop(job, PeerLostError(
                f"{self._me} closed before it served {job.message.op}",
                remedy="ask the controller for the current plan and resend",
                peer=str(self._me),
                operation=job.message.op,
            ))  # fmt: skip

    def _receive_hello(self, identity: Hashable, hello: Hello) -> None:
        if self._admission.full():
            self._reap()
        try:
            welcome = self._admission.open(identity, hello)
        except K3RayError as error:
            self._refuse(identity, hello.generation, 0, 0, error)
        else:
            self._transmit(identity, welcome)

    def _receive_request(self, identity: Hashable, request: Request) -> None:
        cost = message_cost(request.message)
        try:
            channel = self._admission.find(identity)
            self._admission.charge(channel, request.lane, cost)
        except K3RayError as error:
            self._refuse(identity, request.generation, request.request_id, cost, error)
            return
        counters = self._counters[request.lane]
        counters.requests += 1
        counters.bytes_in += cost - HEADER_COST_BYTES
        self._jobs.push(request.lane, _Job(
            channel=channel, request_id=request.request_id, lane=request.lane,
            message=request.message, cost=cost,
        ))  # fmt: skip

    def _advance(self, job: _Job) -> Message | K3RayError | None:
        try:
            if job.run is None:
                job.run = self._handler(job.message)
            next(job.run)
        except StopIteration as end:
            reply: Message = end.value
            return reply
        except K3RayError as error:
            return error
        except Exception as error:  # the handler is foreign code: its client must get an answer
            _log.exception("event=transport.handler_failed op=%s", job.message.op)
            return TransportError(
                f"{job.message.op} failed at {self._me} with {type(error).__name__}",
                remedy=f"see the log of {self._me.actor}",
                peer=str(self._me),
                operation=job.message.op,
                error=type(error).__name__,
            )
        return None

    def _answer(self, job: _Job, outcome: Message | K3RayError) -> None:
        self._admission.release(job.channel, job.lane, job.cost)
        counters = self._counters[job.lane]
        item: Down
        if isinstance(outcome, K3RayError):
            item = self._failure(job, outcome)
        else:
            item = Reply(
                server=self._me, generation=job.channel.generation, request_id=job.request_id,
                credit=job.cost, message=outcome,
            )  # fmt: skip
        # Counted first: a client that has its reply must find it counted.
        size_bytes = item.message.size_bytes if isinstance(item, Reply) else 0
        counters.bytes_out += size_bytes
        counters.errors += not isinstance(item, Reply)
        try:
            delivered = self._transmit(job.channel.identity, item)
        except TransportError as error:  # the reply itself cannot travel
            counters.bytes_out -= size_bytes
            counters.errors += isinstance(item, Reply)
            delivered = self._transmit(job.channel.identity, self._failure(job, error))
        if not delivered:
            self._admission.forget(job.channel)

    def _drop(self, job: _Job, error: K3RayError) -> None:
        if job.run is not None:
            job.run.close()
        self._answer(job, error)

    def _failure(self, job: _Job, error: K3RayError) -> Failure:
        return Failure(
            server=self._me, generation=job.channel.generation, request_id=job.request_id,
            credit=job.cost, error=error,
        )  # fmt: skip

    def _refuse(
        self, identity: Hashable, generation: int, request_id: int, credit: int, error: K3RayError
    ) -> None:
        self._transmit(identity, Failure(
            server=self._me, generation=generation, request_id=request_id, credit=credit,
            error=error,
        ))  # fmt: skip

    def _reap(self) -> None:
        """Forget channels whose client is gone: only sending to them tells."""
        for channel in self._admission.channels:
            # Clients ignore a second welcome.
            probe = Welcome(server=self._me, generation=channel.generation, grants=())
            if not self._transmit(channel.identity, probe):
                self._admission.forget(channel)
