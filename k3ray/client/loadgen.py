"""Load: a bounded number of streams, every token with its time; the evidence of kill tests.

`run_load` keeps the history of each request; `compare` holds it against an undisturbed run and
counts what was lost, doubled or changed.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3ray.client.kimi import AsyncKimiClient
from k3ray.clock import Clock, monotonic
from k3ray.errors import K3RayError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a load: prompt and OpenAI's fields (give a seed to compare runs)."""

    name: str
    prompt: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What one request got.

    Args:
        tokens: Token ids in order of arrival.
        logprobs: One per token, when asked for.
        times_s: Arrival of each token on the load's clock.
        error: Why it ended early.
    """

    name: str
    started_s: float
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    times_s: tuple[float, ...]
    text: str
    finish: str | None
    error: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token."""
        return self.times_s[0] - self.started_s if self.times_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between tokens."""
        return tuple(b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Tokens by what happened to them, against an undisturbed run."""

    lost: int = 0
    doubled: int = 0
    changed: int = 0
    failed: int = 0

    @property
    def none(self) -> bool:
        """Whether nothing happened to any of them."""
        return self == Damage()

    def __add__(self, other: Damage) -> Damage:
        """Both together."""
        return Damage(
            lost=self.lost + other.lost,
            doubled=self.doubled + other.doubled,
            changed=self.changed + other.changed,
            failed=self.failed + other.failed,
        )


async def run_load(
    client: AsyncKimiClient,
    asks: Sequence[Ask],
    *,
    num_streams: int,
    clock: Clock = monotonic,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[History]:
    """Stream every request, at most `num_streams` at once; histories in the order of `asks`.

    Args:
        on_tokens: Told how many tokens have just arrived.
    """
    gate = asyncio.Semaphore(num_streams)

    async def one(ask: Ask) -> History:
        async with gate:
            return await _follow(client, ask, clock, on_tokens)

    return list(await asyncio.gather(*(one(ask) for ask in asks)))


def compare(calm: Iterable[History], seen: Iterable[History]) -> Damage:
    """What the disturbed run did to the tokens; requests are matched by name.

    Raises:
        KeyError: a request has no undisturbed run.
    """
    golden = {history.name: history.tokens for history in calm}
    total = Damage()
    for history in seen:
        total += compare_tokens(golden[history.name], history.tokens)
        total += Damage(failed=int(history.error is not None))
    return total


def compare_tokens(golden: Sequence[Hashable], seen: Sequence[Hashable]) -> Damage:
    """What happened to the tokens of one stream.

    >>> compare_tokens("abcd", "abd").lost
    1
    """
    lost = doubled = changed = 0
    matcher = difflib.SequenceMatcher(None, golden, seen, False)
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        match tag:
            case "delete":
                lost += a1 - a0
            case "insert":
                doubled += b1 - b0
            case "replace":
                changed += max(a1 - a0, b1 - b0)
    return Damage(lost=lost, doubled=doubled, changed=changed)


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` (0 to 1) of `values` do not exceed; nan when there are none.

    >>> percentile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def _follow(
    client: AsyncKimiClient, ask: Ask, clock: Clock, on_tokens: Callable[[int], None]
) -> History:
    started_s = clock()
    tokens: list[int] = []
    logprobs: list[float] = []
    times_s: list[float] = []
    texts: list[str] = []
    finish = error = None
    try:
        async for event in client.stream_completion(ask.prompt, **ask.params):
            tokens += event.token_ids
            logprobs += event.logprobs
            times_s += [clock()] * len(event.token_ids)
            on_tokens(len(event.token_ids))
            texts.append(event.text)
            finish = event.finish or finish
    except K3RayError as caught:
        error = f"{caught.code}: {caught}"
    return History(
        name=ask.name, started_s=started_s, tokens=tuple(tokens), logprobs=tuple(logprobs),
        times_s=tuple(times_s), text="".join(texts), finish=finish, error=error,
    )  # fmt: skip
