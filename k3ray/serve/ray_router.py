"""`RayStackRouter`: the supernode over Ray calls, with a deadline on each and typed errors.

Running streams need only their stack; the controller is asked for stacks and pins, and while it is
being replaced those questions are repeated until their deadline. Ray names hold the term, so a
handle never reaches another life.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray

from k3ray.actors.ray_calls import call_async
from k3ray.actors.specs import CONTROLLER_NAME, NAMESPACE
from k3ray.clock import Clock, Deadline, monotonic
from k3ray.control.supervisor import ProcessFacts
from k3ray.engine.request import Request, TokenEvent
from k3ray.errors import DeadlineError, K3RayError, PeerLostError, StaleVersionError
from k3ray.ids import Incarnation, Role

HEARTBEAT_S = 5.0
_STACKS_AGE_S = 0.5
_NAP_S = 0.1
_FAR_LOAD = 4
_log = logging.getLogger(__name__)


class RayStackRouter:
    """A `StackRouter` on the controller and stack actors.

    Args:
        ingress: Actor id under which this process registers ("ingress-0").
        call_s: Deadline of one control call.
        controller_s: How long to repeat a question while the controller is being replaced.
        change_s: Deadline of a change of the latest version.
    """

    def __init__(
        self,
        ingress: str,
        *,
        call_s: float = 10.0,
        controller_s: float = 60.0,
        change_s: float = 300.0,
        clock: Clock = monotonic,
    ) -> None:
        self._ingress = ingress
        self._call_s = call_s
        self._controller_s = controller_s
        self._change_s = change_s
        self._clock = clock
        self._controller: Any = None
        self._handles: dict[Incarnation, Any] = {}
        self._names: dict[Incarnation, str] = {}
        self._loads: dict[Incarnation, int] = {}
        self._own: Counter[Incarnation] = Counter()
        self._placed: dict[str, Incarnation] = {}
        self._asked_s = float("-inf")
        self._asking = asyncio.Lock()
        self._pins: dict[str, str] = {}
        self._life: Incarnation | None = None

    async def pin(self, request_id: str, version: str | None) -> str:
        """See `StackRouter.pin`."""
        pinned: str = await self._ask("pin", version, request_id, self._life)
        self._pins[request_id] = pinned
        return pinned

    async def unpin(self, request_id: str) -> None:
        """See `StackRouter.unpin`; a pin that cannot be given back ends by its age."""
        self._pins.pop(request_id, None)
        try:
            await self._ask("unpin", request_id, limit_s=self._call_s)
        except K3RayError as error:
            _log.warning("event=unpin.failed request=%s error=%s", request_id, error.code)

    async def choose(self, *, affinity: int, avoid: frozenset[Incarnation]) -> Incarnation | None:
        """See `StackRouter.choose`: rendezvous by prefix unless that stack is far busier."""
        await self._refresh()
        ready = {
            stack: load + self._own[stack]
            for stack, load in self._loads.items()
            if stack not in avoid
        }
        if not ready:
            self._asked_s = float("-inf")  # look again at the next try
            return None
        least = min(ready.values())
        near = [stack for stack, load in ready.items() if load <= least + _FAR_LOAD]
        return max(near, key=lambda stack: _rendezvous(affinity, stack))

    async def submit(self, stack: Incarnation, request: Request) -> None:
        """See `StackRouter.submit`."""
        await self._call(stack, "submit", request)
        self._forget(request.request_id)
        self._placed[request.request_id] = stack
        self._own[stack] += 1

    async def poll(
        self, stack: Incarnation, request_id: str, *, after: int, term: int, wait_s: float
    ) -> Sequence[TokenEvent]:
        """See `StackRouter.poll`."""
        events: list[TokenEvent] = await self._call(
            stack, "poll", request_id, after, term, wait_s, extra_s=wait_s
        )
        if events and events[-1].finish is not None:
            self._forget(request_id)
        return events

    async def cancel(self, stack: Incarnation, request_id: str) -> None:
        """See `StackRouter.cancel`."""
        self._forget(request_id)
        try:
            await self._call(stack, "cancel", request_id)
        except K3RayError as error:
            _log.info("event=cancel.failed stack=%s error=%s", stack, error.code)

    async def report_lost(self, stack: Incarnation) -> None:
        """See `StackRouter.report_lost`."""
        self._loads.pop(stack, None)
        self._handles.pop(stack, None)
        self._asked_s = float("-inf")
        try:
            await self._ask("report_lost", stack, self._ingress, limit_s=self._call_s)
        except K3RayError as error:
            _log.warning("event=report_lost.failed stack=%s error=%s", stack, error.code)

    async def scale(self, *, groups: int) -> dict[str, Any]:
        """See `StackRouter.scale`."""
        asked: dict[str, Any] = await self._ask("scale", groups, None)
        return asked

    async def weight_info(self) -> dict[str, Any]:
        """See `StackRouter.weight_info`."""
        info: dict[str, Any] = await self._ask("weight_info", limit_s=self._call_s)
        return info

    async def use_version(self, version: str) -> str:
        """See `StackRouter.use_version`; one long call, repeated if the controller is replaced."""
        before: str = await self._ask(
            "use_version", version, limit_s=self._change_s, call_s=self._change_s
        )
        return before

    async def status(self) -> dict[str, Any]:
        """See `StackRouter.status`."""
        document: dict[str, Any] = await self._ask("status", limit_s=self._call_s)
        return document

    async def controller_process(self) -> ProcessFacts:
        """Where the controller runs."""
        facts: ProcessFacts = await self._ask("process", limit_s=self._call_s)
        return facts

    async def stay_registered(self, *, pid: int, node: str, endpoint: str) -> None:
        """Be known to the controller as an ingress; runs until cancelled."""
        while True:
            try:
                if self._life is None:
                    self._life = await self._ask(
                        "register", str(Role.INGRESS), self._ingress, pid, node, endpoint
                    )
                    await self._pin_again()
                else:
                    await self._ask("heartbeat", self._life)
            except K3RayError as error:  # fenced by a new controller, or none there: once more
                _log.warning("event=ingress.unregistered error=%s", error.code)
                self._life = None
            await asyncio.sleep(HEARTBEAT_S)

    async def _pin_again(self) -> None:
        """Tell a new controller what the open requests pin: pins do not outlive a controller."""
        for request_id, version in list(self._pins.items()):
            try:
                await self._ask("pin", version, request_id, self._life)
                if request_id not in self._pins:  # it ended meanwhile
                    await self._ask("unpin", request_id)
            except StaleVersionError as error:  # that request will fail, and say so
                _log.warning("event=pin.lost request=%s error=%s", request_id, error)

    async def _refresh(self) -> None:
        """Ask for the stacks when the last answer is old; concurrent callers share one question."""
        async with self._asking:
            if self._clock() - self._asked_s < _STACKS_AGE_S:
                return
            listed = await self._ask("stacks")
            self._asked_s = self._clock()
            found = {Incarnation(actor=s["id"], term=s["term"]): s for s in listed}
            self._loads = {stack: int(entry["load"]) for stack, entry in found.items()}
            self._names |= {stack: entry["actor_name"] for stack, entry in found.items()}
            in_use = {*found, *self._placed.values()}
            self._handles = {s: h for s, h in self._handles.items() if s in in_use}
            self._names = {s: n for s, n in self._names.items() if s in in_use}

    def _forget(self, request_id: str) -> None:
        stack = self._placed.pop(request_id, None)
        if stack is not None:
            self._own[stack] -= 1
            if self._own[stack] <= 0:
                del self._own[stack]

    async def _call(self, stack: Incarnation, method: str, *args: Any, extra_s: float = 0.0) -> Any:
        handle = self._handles.get(stack)
        if handle is None:
            handle = await _find_actor(self._names.get(stack, ""), str(stack))
            self._handles[stack] = handle
        return await call_async(
            handle, method, *args, peer=str(stack), limit_s=self._call_s + extra_s
        )

    async def _ask(
        self, method: str, *args: Any, limit_s: float | None = None, call_s: float | None = None
    ) -> Any:
        """Ask the controller, again while it is gone, at most `controller_s`."""
        deadline = Deadline.after(
            self._controller_s if limit_s is None else limit_s,
            operation=method, peer=CONTROLLER_NAME, clock=self._clock,
        )  # fmt: skip
        while True:
            try:
                if self._controller is None:
                    self._controller = await _find_actor(CONTROLLER_NAME, CONTROLLER_NAME)
                return await call_async(
                    self._controller, method, *args, peer=CONTROLLER_NAME,
                    limit_s=min(call_s or self._call_s, max(0.1, deadline.left_s())),
                )  # fmt: skip
            except (PeerLostError, DeadlineError):
                self._controller = None
                if deadline.passed():
                    raise
                await asyncio.sleep(_NAP_S)


async def _find_actor(name: str, peer: str) -> Any:
    try:
        return await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
    except ValueError as error:
        raise PeerLostError(
            f"there is no actor {name!r} ({peer})", remedy="see `k3ray status`",
            peer=peer, operation="find",
        ) from error  # fmt: skip


def _rendezvous(affinity: int, stack: Incarnation) -> bytes:
    return hashlib.blake2b(f"{affinity}/{stack.actor}".encode(), digest_size=8).digest()
