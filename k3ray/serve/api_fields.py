"""The fields of the two request bodies, checked one by one; every complaint names its field.

Pydantic models of the edge only: `ChatBody` and `CompletionBody` share `SamplingBody`. Fields that
change nothing here (`user`, `metadata`, ...) are accepted; fields that would change the answer and
are not supported yet (`functions`, `suffix`, ...) are refused by name; unknown ones too.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from k3ray.errors import BadRequestError
from k3ray.text.strict_json import bad_field, json_kind, shown

MAX_TOKENS = 1 << 20
MAX_CHOICES = 8
MAX_LOGPROBS = 20
MAX_STOPS = 5
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
_ABSENT: tuple[Any, ...] = (None, [], False)


def _stops(value: Any) -> Any:
    """`stop` as a list; OpenAI allows one string too."""
    listed = [value] if isinstance(value, str) else value
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise ValueError(f"must be a string or an array of strings, not {shown(value)}")
    if len(listed) > MAX_STOPS:
        raise ValueError(f"has {len(listed)} entries, at most {MAX_STOPS} are allowed")
    if not all(0 < len(item) <= MAX_STOP_CHARS for item in listed):
        raise ValueError(f"entries need 1 to {MAX_STOP_CHARS} characters")
    return listed


def _biases(value: Any) -> Any:
    """`logit_bias` as {token id: bias}; JSON gives the ids as strings."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must be an object of at most {MAX_LOGIT_BIAS} token ids")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"{shown(key)} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _unsupported(value: Any) -> None:
    if value not in _ABSENT:
        raise ValueError("is not supported yet by this endpoint; leave it out")


def _text_only(value: Any) -> None:
    if value is not None and value != {"type": "text"}:
        raise ValueError('only {"type": "text"} is supported yet; leave it out')


def _only_text_modality(value: Any) -> None:
    if value != ["text"]:
        _unsupported(value)


Unsupported = Annotated[None, BeforeValidator(_unsupported)]
Ignored = Annotated[Any, Field(default=None)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class SamplingBody(_Body):
    """What both endpoints share; None means the default."""

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] = {}
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    prompt_cache_key: Ignored
    safety_identifier: Ignored


class ChatBody(SamplingBody):
    """`/v1/chat/completions`; `text.chat_reader` and `api_turn` check what is `Any` here."""

    messages: Any
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    response_format: Any = None
    parallel_tool_calls: bool | None = None
    verbosity: Ignored
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    modalities: Annotated[None, BeforeValidator(_only_text_modality)] = None


class CompletionBody(SamplingBody):
    """`/v1/completions`; `prompt` is checked by `api_prompts`."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=1)
    suffix: Unsupported = None
    response_format: Annotated[None, BeforeValidator(_text_only)] = None


BodyT = TypeVar("BodyT", bound=SamplingBody)


def read_body(kind: type[BodyT], document: Mapping[str, Any]) -> BodyT:
    """Check a parsed body.

    Raises:
        BadRequestError: the first field that is missing, unknown, of a wrong type or range.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _complaint(kind, error) from None


def _complaint(kind: type[SamplingBody], error: ValidationError) -> BadRequestError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    value = first.get("input")
    match first["type"]:
        case "missing":
            return bad_field(place, "is required")
        case "extra_forbidden":
            known = kind.model_fields if len(first["loc"]) == 1 else StreamOptions.model_fields
            near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
            return bad_field(
                place,
                "is not a known field",
                remedy=f"did you mean {near[0]}?" if near else "leave it out",
            )
        case "value_error":
            return bad_field(place, str(first["ctx"]["error"]))
        case _:
            return bad_field(
                place, f"{first['msg'].lower()} (got {json_kind(value)} {shown(value)})"
            )
