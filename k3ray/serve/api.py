"""The OpenAI API's requests as values: bytes in, `Call` out, or an error that names the field.

Pure: no tokenizer, no clock, no network. A `Call` says everything about the request but its
tokens; its `digest` tells a repeat from a clash under one idempotency key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from k3ray.engine.request import SamplingParams
from k3ray.errors import BadRequestError, ContextLengthError, UnknownModelError
from k3ray.serve.api_fields import ChatBody, CompletionBody, SamplingBody, read_body
from k3ray.serve.api_prompts import read_prompts
from k3ray.serve.api_turn import read_turn
from k3ray.text.chat import NO_OPTIONS, ChatMessage, TurnOptions
from k3ray.text.chat_reader import read_messages
from k3ray.text.strict_json import bad_field, parse_json_object, shown

MODEL_ALIAS = "kimi-k3"
_NOT_IN_DIGEST = ("stream", "stream_options")


class CallKind(StrEnum):
    """Which endpoint was called."""

    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One checked HTTP request.

    Args:
        messages, turn, thinking: Chat only; `thinking` is None for the endpoint's default, and
            stands above `turn.thinking`.
        prompts: Completions only: texts or token ids, one per prompt.
        max_tokens: None means the endpoint's default.
        seed: None means that the ingress draws one.
        logprobs: Whether log-probabilities are sent; `sampling.num_logprobs` is the number of
            alternatives beside each token's own.
        one_tool_call: Chat only: the answer ends where a second call would begin.
        digest: Of everything but how the answer is delivered.
    """

    kind: CallKind
    model: str
    messages: tuple[ChatMessage, ...] = ()
    turn: TurnOptions = NO_OPTIONS
    thinking: bool | None = None
    one_tool_call: bool = False
    prompts: tuple[str | tuple[int, ...], ...] = ()
    sampling: SamplingParams
    max_tokens: int | None
    num_choices: int
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool
    echo: bool = False
    stream: bool
    include_usage: bool
    return_token_ids: bool
    digest: str


def parse_chat(body: bytes, *, models: Collection[str]) -> Call:
    """Read a `/v1/chat/completions` body.

    Raises:
        BadRequestError: not JSON, or a field is wrong (named).
        UnknownModelError: `model` is not one of `models`.
    """
    document = parse_json_object(body)
    fields = read_body(ChatBody, document)
    _check_model(fields.model, models)
    if fields.top_logprobs and not fields.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    longest = fields.max_completion_tokens
    messages = read_messages(fields.messages)
    thinking, turn = read_turn(fields, messages)
    return Call(
        kind=CallKind.CHAT,
        messages=messages,
        turn=turn,
        thinking=thinking,
        one_tool_call=fields.parallel_tool_calls is False,
        **_common(fields, document, logprobs=bool(fields.logprobs), top=fields.top_logprobs or 0),
        max_tokens=fields.max_tokens if longest is None else longest,
    )


def parse_completion(body: bytes, *, models: Collection[str]) -> Call:
    """Read a `/v1/completions` body (raises as `parse_chat`)."""
    document = parse_json_object(body)
    fields = read_body(CompletionBody, document)
    _check_model(fields.model, models)
    if fields.echo and fields.logprobs is not None:
        raise bad_field(
            "echo",
            "log-probabilities of the prompt are not supported yet",
            remedy="drop echo or logprobs",
        )
    return Call(
        kind=CallKind.COMPLETION,
        prompts=read_prompts(fields.prompt),
        echo=bool(fields.echo),
        **_common(fields, document, logprobs=fields.logprobs is not None, top=fields.logprobs or 0),
        max_tokens=fields.max_tokens,
    )


def fit_max_tokens(
    asked: int | None, *, num_prompt_tokens: int, context: int, default: int, param: str
) -> int:
    """How many tokens may be generated.

    Args:
        asked: The client's `max_tokens`, or None.
        context: Tokens that prompt and answer may have together.
        default: Used when nothing was asked, cut to what fits.
        param: The field that holds the prompt, for the error.

    Raises:
        ContextLengthError: the prompt, or prompt plus `asked`, does not fit.
    """
    room = context - num_prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        also = "" if asked is None else f" and {asked} more are asked for"
        raise ContextLengthError(
            f"the context holds {context} tokens, the prompt has {num_prompt_tokens}{also}",
            remedy="shorten the prompt" if room < 1 else f"ask for at most {room} tokens",
            param=param if room < 1 else "max_tokens",
        )
    return min(default, room) if asked is None else asked


def _common(
    fields: SamplingBody, document: Mapping[str, Any], *, logprobs: bool, top: int
) -> dict[str, Any]:
    """The arguments of `Call` that both endpoints share."""
    sampling = SamplingParams(
        temperature=_or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=max(0, _or(fields.top_k, 0)),
        min_p=_or(fields.min_p, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=tuple(sorted(fields.logit_bias.items())),
        ignore_eos=bool(fields.ignore_eos),
        num_logprobs=top,
    )
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise bad_field("stream_options", "needs stream to be true")
    return {
        "model": fields.model,
        "sampling": sampling,
        "num_choices": _or(fields.n, 1),
        "stop": tuple(fields.stop),
        "seed": None if fields.seed is None else fields.seed % (1 << 64),
        "logprobs": logprobs,
        "stream": bool(fields.stream),
        "include_usage": options is not None and options.include_usage,
        "return_token_ids": bool(fields.return_token_ids),
        "digest": _digest(document),
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_model(model: str, models: Collection[str]) -> None:
    if model not in models:
        raise UnknownModelError(
            f"the model {shown(model)} does not exist here",
            remedy=f"use one of {', '.join(sorted(models))}",
            param="model",
        )


def _digest(document: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in document.items() if key not in _NOT_IN_DIGEST}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_tokens(tokens: tuple[int, ...], *, vocab_size: int) -> None:
    """Token ids of a client must lie in the vocabulary.

    Raises:
        BadRequestError: one does not.
    """
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise BadRequestError(
            f"prompt: token {shown(wrong)} is outside [0, {vocab_size})",
            remedy="use this model's tokenizer",
            param="prompt",
        )
