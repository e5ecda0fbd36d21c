"""`ScriptedRouter`: an in-memory `StackRouter` whose stacks die, stall and lie on command.

Tokens are a pure function of (prompt, seed, choice, version, position), as the real engine's are.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3ray.engine.request import FinishReason, Request, TokenEvent
from k3ray.errors import (
    CapacityError,
    FencedError,
    PeerLostError,
    PlanError,
    ScalingError,
    StaleVersionError,
    StoreError,
    UnknownRequestError,
)
from k3ray.ids import Incarnation

VERSION = "main@0-0123456789ab"


def scripted_token(request: Request, position: int) -> int:
    """A printable ASCII byte, which is its own id in a byte-level tokenizer."""
    text = f"{request.prompt}/{request.seed}/{request.choice}/{request.version}/{position}"
    return 32 + hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 95


@dataclass(slots=True, kw_only=True)
class Held:
    """A request at a stack."""

    request: Request
    term: int
    cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class ScriptedRouter:
    """See the module.

    Args:
        token: Chooses tokens.
        kill_at: Positions at which the stack of that request dies, each once.
        step: Most events per poll.
        gate: When set, polls wait for it (never answers on its own).
        capacity: Requests that one stack takes.
    """

    token: Callable[[Request, int], int] = scripted_token
    num_stacks: int = 1
    kill_at: set[int] = field(default_factory=set)
    step: int = 1
    gate: asyncio.Event | None = None
    capacity: int = 1000
    version: str = VERSION
    live: set[str] = field(default_factory=lambda: {VERSION})
    stored: set[str] = field(default_factory=lambda: {VERSION})
    terms: dict[str, int] = field(default_factory=dict)
    held: dict[Incarnation, dict[str, Held]] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    submitted: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    lost: list[Incarnation] = field(default_factory=list)
    polls: int = 0
    scaling: dict[str, Any] = field(
        default_factory=lambda: {
            "groups": 2, "stacks": 1, "under_way": False, "failure": "",
            "target": {"groups": 2, "stacks": 1},
        }
    )  # fmt: skip

    def __post_init__(self) -> None:
        for index in range(self.num_stacks):
            self._revive(f"stack-{index}")

    def _revive(self, actor: str) -> None:
        self.terms[actor] = self.terms.get(actor, 0) + 1
        self.held[Incarnation(actor=actor, term=self.terms[actor])] = {}

    def kill(self, stack: Incarnation) -> None:
        """The stack dies; its next life is there at once."""
        if self.held.pop(stack, None) is not None:
            self._revive(stack.actor)

    async def pin(self, request_id: str, version: str | None) -> str:
        chosen = version or self.version
        if chosen not in self.live:
            raise StaleVersionError(f"{chosen} is not live", remedy="take a live one")
        self.pins[request_id] = chosen
        return chosen

    async def unpin(self, request_id: str) -> None:
        self.pins.pop(request_id, None)

    async def choose(self, *, affinity: int, avoid: frozenset[Incarnation]) -> Incarnation | None:
        ready = sorted(stack for stack in self.held if stack not in avoid)
        return ready[affinity % len(ready)] if ready else None

    async def submit(self, stack: Incarnation, request: Request) -> None:
        requests = self._alive(stack)
        if len(requests) >= self.capacity:
            raise CapacityError("the stack is full", remedy="retry", retry_after_s=2.0)
        self.submitted.append(request)
        requests[request.request_id] = Held(request=request, term=request.term)

    async def poll(
        self, stack: Incarnation, request_id: str, *, after: int, term: int, wait_s: float
    ) -> Sequence[TokenEvent]:
        self.polls += 1
        await asyncio.sleep(0)
        if self.gate is not None:
            try:
                await asyncio.wait_for(self.gate.wait(), wait_s)
            except TimeoutError:
                return []
        held = self._alive(stack).get(request_id)
        if held is None:
            raise UnknownRequestError("unknown", remedy="resubmit")
        if term < held.term:
            raise FencedError("an old term", remedy="give up")
        if after + 1 in self.kill_at:
            self.kill_at.discard(after + 1)
            self.kill(stack)
            raise PeerLostError(f"{stack} died", remedy="", peer=str(stack))
        if held.cancelled:
            return [TokenEvent(position=after + 1, token=None, finish=FinishReason.ABORTED)]
        return self.events(held.request, after)

    def events(self, request: Request, after: int) -> list[TokenEvent]:
        """The next `step` events after a position."""
        found: list[TokenEvent] = []
        limit = request.sampling.max_tokens
        for position in range(after + 1, min(after + 1 + self.step, limit)):
            token = self.token(request, position)
            stopped = token in request.sampling.stop_token_ids
            last = FinishReason.LENGTH if position == limit - 1 else None
            found.append(
                TokenEvent(
                    position=position,
                    token=token,
                    logprob=-token / 100,
                    top_logprobs=((token, -token / 100),) * request.sampling.num_logprobs,
                    finish=FinishReason.STOP if stopped else last,
                    version=request.version,
                    plan=1,
                )
            )
            if stopped:
                break
        return found

    async def cancel(self, stack: Incarnation, request_id: str) -> None:
        self.cancelled.append(request_id)
        held = self.held.get(stack, {}).get(request_id)
        if held is not None:
            held.cancelled = True

    async def report_lost(self, stack: Incarnation) -> None:
        self.lost.append(stack)

    async def scale(self, *, groups: int) -> dict[str, Any]:
        if groups > 8:
            raise PlanError(f"{groups} groups for 8 experts", remedy="ask for fewer")
        if self.scaling["under_way"]:
            raise ScalingError("the size is being changed", remedy="wait")
        self.scaling = {
            **self.scaling, "target": {"groups": groups, "stacks": 1}, "under_way": True,
            "failure": "",
        }  # fmt: skip
        return {"size": {"groups": groups, "stacks": 1}}

    async def weight_info(self) -> dict[str, Any]:
        return {"line": "main", "version": self.version, "stored": sorted(self.stored)}

    async def use_version(self, version: str) -> str:
        if version not in self.stored:
            raise StoreError(f"no readable entry {version}", remedy="see what is stored")
        before, self.version = self.version, version
        self.live.add(version)
        return before

    async def status(self) -> dict[str, Any]:
        return {
            "name": "k3", "state": "ready", "plan_version": 1, "actors": [], "versions": [],
            "scaling": dict(self.scaling),
        }  # fmt: skip

    def _alive(self, stack: Incarnation) -> dict[str, Held]:
        if stack not in self.held:
            raise PeerLostError(f"{stack} is dead", remedy="", peer=str(stack))
        return self.held[stack]
