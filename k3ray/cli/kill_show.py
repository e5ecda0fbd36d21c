"""The show: a stream that survives the SIGKILL of a group that its next token needs.

The same seeded completion runs twice through the `openai` client: undisturbed, then with a group
killed between two streamed tokens. Both must give the same tokens and log-prob bits. The proof
that the kill mattered: the stack had to repeat expert calls that the dead group owed it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from k3ray.errors import SupernodeError

_COUNTERS_LIMIT_S = 15.0

Say = Callable[[str], None]
Status = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one streamed completion gave: token texts, log-probabilities, arrival times in s."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    arrivals_s: tuple[float, ...]
    first_token_s: float

    @property
    def steps(self) -> tuple[tuple[str, float], ...]:
        """Tokens with their log-probabilities; JSON keeps every bit of a float."""
        return tuple(zip(self.tokens, self.logprobs, strict=True))

    @property
    def longest_gap_s(self) -> float:
        """The longest wait between two tokens."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillReport:
    """Outcome of `kill_during_stream`."""

    undisturbed: Stream
    disturbed: Stream
    group: str
    plan_before: int
    plan_after: int
    stall_s: float
    rebuild_s: float
    hop_retries: int

    @property
    def same_bits(self) -> bool:
        """Whether both runs gave the same tokens with the same log-probabilities, bit for bit."""
        return self.undisturbed.steps == self.disturbed.steps


def stream_completion(
    client: OpenAI, prompt: str, *, max_tokens: int, seed: int, on_token: Callable[[int], None]
) -> Stream:
    """One streamed `/v1/completions`; `on_token(n)` is called after the n-th token arrived."""
    tokens: list[str] = []
    logprobs: list[float] = []
    arrivals: list[float] = []
    text = ""
    started_s = time.monotonic()
    chunks = client.completions.create(
        model="kimi-k3", prompt=prompt, max_tokens=max_tokens, seed=seed, temperature=0.8,
        logprobs=1, stream=True, extra_body={"ignore_eos": True},
    )  # fmt: skip
    for chunk in chunks:
        choice = chunk.choices[0] if chunk.choices else None
        if choice is None:
            continue
        text += choice.text
        found = choice.logprobs
        for token, logprob in zip(
            (found.tokens or []) if found else [],
            (found.token_logprobs or []) if found else [],
            strict=True,
        ):
            tokens.append(token)
            logprobs.append(logprob)
            arrivals.append(time.monotonic() - started_s)
            on_token(len(tokens))
    return Stream(
        text=text, tokens=tuple(tokens), logprobs=tuple(logprobs), arrivals_s=tuple(arrivals),
        first_token_s=arrivals[0] if arrivals else float("nan"),
    )  # fmt: skip


def kill_during_stream(
    base_url: str, status: Status, *, prompt: str, num_tokens: int, say: Say
) -> KillReport:
    """Run the show.

    Raises:
        SupernodeError: the killed group was not rebuilt within two minutes.
    """
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=300.0, max_retries=0)
    undisturbed = stream_completion(
        client, prompt, max_tokens=num_tokens, seed=7, on_token=lambda _: None
    )
    say(f"undisturbed: {len(undisturbed.tokens)} tokens, {undisturbed.text[:60]!r}...")
    before = status()
    group = _fullest_group(before["actors"])
    kill_at = max(1, num_tokens // 3)
    watch = ThreadPoolExecutor(1)
    rebuilt: list[Future[float]] = []

    def kill(count: int) -> None:
        if count == kill_at:
            os.kill(group["pid"], signal.SIGKILL)
            rebuilt.append(watch.submit(_rebuild_s, status, group))
            say(f"token {count} received; SIGKILL to {group['id']} (pid {group['pid']})")

    disturbed = stream_completion(client, prompt, max_tokens=num_tokens, seed=7, on_token=kill)
    with watch:
        rebuild_s = rebuilt[0].result()
    after = _status_with_retries(status, before)
    return KillReport(
        undisturbed=undisturbed, disturbed=disturbed, group=group["id"],
        plan_before=before["plan_version"], plan_after=after["plan_version"],
        stall_s=disturbed.longest_gap_s, rebuild_s=rebuild_s,
        hop_retries=_hop_retries(after) - _hop_retries(before),
    )  # fmt: skip


def _rebuild_s(status: Status, group: dict[str, Any]) -> float:
    """Seconds from now until the killed group is ready again."""
    started_s = time.monotonic()
    wait_rebuilt(status, group["id"], than_term=group["term"])
    return time.monotonic() - started_s


def wait_rebuilt(
    status: Status, actor: str, *, than_term: int, limit_s: float = 120.0
) -> dict[str, Any]:
    """Poll until `actor` is ready with a higher term; returns that status."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        document = status()
        for entry in document["actors"]:
            if entry["id"] == actor and entry["term"] > than_term and entry["state"] == "ready":
                return document
        time.sleep(0.1)
    raise SupernodeError(
        f"{actor} was not rebuilt within {limit_s:g} s", remedy="see `k3ray status`", peer=actor
    )


def _status_with_retries(status: Status, before: dict[str, Any]) -> dict[str, Any]:
    """The status once the stacks' counters in it, which the controller reads every few seconds,
    show a repeated expert call; the last one seen when none does."""
    deadline_s = time.monotonic() + _COUNTERS_LIMIT_S
    while True:
        document = status()
        if _hop_retries(document) > _hop_retries(before) or time.monotonic() >= deadline_s:
            return document
        time.sleep(0.2)


def _fullest_group(actors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    groups = [a for a in actors if a["role"] == "expert_group" and a["state"] == "ready"]
    return max(groups, key=lambda g: (sum(map(len, g["experts"].values())), g["id"]))


def _hop_retries(document: dict[str, Any]) -> int:
    return sum(int(actor.get("hop_retries", 0)) for actor in document["actors"])
