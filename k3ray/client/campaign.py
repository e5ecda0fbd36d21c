"""A chaos campaign: seeded streams, seeded faults, and a verdict from what the clients saw.

Every stream is run once undisturbed; then all of them run over and over while faults strike. Each
token with its log-probability must be what the undisturbed run gave. Faults hit processes of this
machine by pid; the supernode says who they are.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from k3ray.client.faults import Fault, FaultKind
from k3ray.client.kimi import AsyncKimiClient
from k3ray.client.loadgen import Ask, Damage, History, compare_tokens, percentile, run_load
from k3ray.clock import Clock, Deadline, monotonic
from k3ray.errors import K3RayError

SLOW_S = 0.5
_LOOK_EVERY_S = 0.1

Status = Callable[[], dict[str, Any]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that was carried out: whom it hit, and seconds until the supernode was whole."""

    fault: Fault
    actor: str
    whole_s: float


@dataclass(slots=True, kw_only=True)
class Campaign:
    """One run; see the module.

    Args:
        client: Of the endpoint.
        status: Asks the supernode; may fail while its controller is replaced.
        asks: The streams; each needs a seed and log-probabilities.
        whole_s: How long the supernode may take to be whole again.
    """

    client: AsyncKimiClient
    status: Status
    asks: Sequence[Ask]
    whole_s: float = 180.0
    say: Say = print
    clock: Clock = monotonic
    golden: dict[str, History] = field(default_factory=dict)
    damage: Damage = field(default_factory=Damage)
    errors: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    num_streams: int = 0
    num_tokens: int = 0

    async def run(self, faults: Sequence[Fault]) -> bool:
        """Carry it out; whether the clients saw nothing of it.

        Raises:
            DeadlineError: the supernode did not become whole again after a fault.
            K3RayError: an undisturbed stream failed.
        """
        for history in await run_load(self.client, self.asks, num_streams=len(self.asks)):
            if history.error is not None or not history.tokens:
                raise K3RayError(
                    f"the undisturbed stream {history.name} failed: {history.error}",
                    remedy="the supernode must be whole before a campaign",
                )
            self.golden[history.name] = history
        over = asyncio.Event()
        streams = [asyncio.create_task(self._repeat(ask, over)) for ask in self.asks]
        try:
            for fault in faults:
                reached = partial(self._has_received, fault.at_token)
                await self._until(reached, f"{fault.at_token} tokens")
                self.strikes.append(await self._strike(fault))
        finally:
            over.set()
            await asyncio.gather(*streams)
        return self.damage.none and not self.errors

    async def _repeat(self, ask: Ask, over: asyncio.Event) -> None:
        golden = _steps(self.golden[ask.name])
        while not over.is_set():
            (seen,) = await run_load(self.client, [ask], num_streams=1, on_tokens=self._count)
            self.num_streams += 1
            self.gaps_s += [max(seen.gaps_s)] if seen.gaps_s else []
            self.damage += compare_tokens(golden, _steps(seen))
            if seen.error is not None:
                self.errors.append(f"{ask.name}: {seen.error}")
                await asyncio.sleep(_LOOK_EVERY_S)

    def _has_received(self, num_tokens: int) -> bool:
        return self.num_tokens >= num_tokens

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    async def _strike(self, fault: Fault) -> Strike:
        victim = await self._victim(fault)
        pid, actor, term = int(victim["pid"]), str(victim["id"]), int(victim["term"])
        began_s = self.clock()
        _signal(pid, signal.SIGKILL if fault.kind is FaultKind.KILL else signal.SIGSTOP)
        if fault.kind is FaultKind.SLOW:
            await asyncio.sleep(SLOW_S)
            _signal(pid, signal.SIGCONT)
        least = term if fault.kind is FaultKind.SLOW else term + 1
        await self._until(lambda: self._is_whole(actor, least), f"{actor} after {fault.kind}")
        whole_s = self.clock() - began_s
        _signal(pid, signal.SIGCONT)  # what wakes up now must change nothing
        self.say(
            f"fault {fault.number}: {fault.kind} {actor} (term {term}) after {fault.at_token} "
            f"tokens, whole after {whole_s:.2f} s"
        )
        return Strike(fault=fault, actor=actor, whole_s=whole_s)

    async def _victim(self, fault: Fault) -> Mapping[str, Any]:
        found: list[Mapping[str, Any]] = []

        def look() -> bool:
            victim = fault.victim(self._actors())
            found.extend([] if victim is None else [victim])
            return bool(found)

        await self._until(look, f"a {fault.role}")
        return found[0]

    def _actors(self) -> list[dict[str, Any]]:
        try:
            actors: list[dict[str, Any]] = self.status()["actors"]
        except K3RayError:
            return []
        return actors

    def _is_whole(self, actor: str, least_term: int) -> bool:
        try:
            document = self.status()
        except K3RayError:
            return False
        terms = [a["term"] for a in document["actors"] if a["id"] == actor]
        return document["state"] == "ready" and any(term >= least_term for term in terms)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = Deadline.after(self.whole_s, operation="chaos", peer=what, clock=self.clock)
        while not await asyncio.to_thread(condition):
            deadline.check(remedy="see `k3ray status`")
            await asyncio.sleep(_LOOK_EVERY_S)

    def report(self) -> dict[str, Any]:
        """Figures of the run; JSON-able."""
        took: dict[str, list[float]] = {}
        for strike in self.strikes:
            took.setdefault(f"{strike.fault.role} {strike.fault.kind}", []).append(strike.whole_s)
        return {
            "faults": len(self.strikes),
            "struck": {what: len(times) for what, times in sorted(took.items())},
            "streams": self.num_streams,
            "tokens": self.num_tokens,
            "lost": self.damage.lost,
            "doubled": self.damage.doubled,
            "changed": self.damage.changed,
            "errors": len(self.errors),
            "first_errors": self.errors[:3],
            "gap_p50_s": round(percentile(self.gaps_s, 0.5), 3),
            "gap_p99_s": round(percentile(self.gaps_s, 0.99), 3),
            "whole_p50_s": {
                what: round(percentile(times, 0.5), 2) for what, times in sorted(took.items())
            },
        }


def _steps(history: History) -> tuple[tuple[int, float], ...]:
    """Tokens with their log-probabilities; a broken stream may have one without the other."""
    return tuple(zip(history.tokens, history.logprobs, strict=False))


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def seeded_asks(num_streams: int, num_tokens: int) -> list[Ask]:
    """Streams that can be compared: a seed each, log-probabilities, a fixed length."""
    params: Mapping[str, Any] = {
        "max_tokens": num_tokens, "temperature": 0.8, "logprobs": 1, "ignore_eos": True,
    }  # fmt: skip
    return [
        Ask(name=f"stream-{i}", prompt=f"Campaign, stream {i}: ", params={**params, "seed": i})
        for i in range(num_streams)
    ]
