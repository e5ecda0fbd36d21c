"""The nouns of serving: `SamplingParams`, `Request`, `TokenEvent`, `FinishReason`.

A request is complete in itself: (prompt tokens + tokens already emitted, seed, weight version)
determine every further token, so any stack can continue it at any position.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended (the OpenAI words, and two of ours)."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One choice to generate.

    Args:
        request_id: Unique; the idempotency key at a stack.
        prompt: Prompt token ids, at least one.
        emitted: Tokens already generated (elsewhere); generation goes on after them and they
            count against `max_tokens` and as context of penalties.
        seed: 64-bit sampling seed.
        choice: Choice index, part of the noise counter.
        version: Weight version (its text) the request is pinned to.
        term: The ingress's term for this request; grows at every hand-over to another stack.
    """

    request_id: str
    prompt: tuple[int, ...]
    emitted: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    seed: int
    choice: int = 0
    version: str
    term: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One generated token, or the end of the request.

    Args:
        position: Index among the generated tokens, from 0 (emitted ones included).
        token: The token id; None in an end event without a token.
        logprob: Natural log-probability of the token under the unmodified distribution
            (temperature 1, no filter), fp32.
        top_logprobs: (token, log-probability) pairs, most likely first.
        finish: Set on the last event.
        version, plan: Weight version and plan version that produced the token.
        error: Typed error code and text when `finish` is ERROR.
    """

    position: int
    token: int | None
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    version: str = ""
    plan: int = 0
    error: str | None = None
