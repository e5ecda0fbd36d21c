"""The API's door: every bad body gets an error that names its field, every good one its value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k3ray.errors import BadRequestError, CapacityError, ContextLengthError, UnknownModelError
from k3ray.serve.api import Call, fit_max_tokens, parse_chat, parse_completion
from k3ray.serve.api_errors import error_reply

MODELS = ("k3", "kimi-k3")
USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Call:
    body = {"model": "k3", "messages": USER, **fields}
    return parse_chat(json.dumps(body).encode(), models=MODELS)


def completion(**fields: Any) -> Call:
    body = {"model": "kimi-k3", "prompt": "hi", **fields}
    return parse_completion(json.dumps(body).encode(), models=MODELS)


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages[0].nmae"),
    ({"messages": [*USER, {"role": "user", "content": "\ud83d"}]}, "messages[1].content"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1e12}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"stop": 7}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 6}, "stop"),
    ({"stop": "\udc00"}, "stop"),
    ({"user": "\ud83d"}, "user"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}}},
        "response_format.json_schema.strict",
    ),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "keep": "none"}}, "thinking.keep"),
    ({"thinking": {"typ": "enabled"}}, "thinking.typ"),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort"),
    ({"thinking": {"effort": "low"}, "reasoning_effort": "max"}, "thinking.effort"),
    ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"temprature": 1}, "temprature"),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=lambda v: str(v)[:50])
def test_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(**fields)
    reply = error_reply(caught.value)
    assert reply.status == 400
    assert reply.body["error"]["param"] == param
    assert reply.body["error"]["type"] == "invalid_request_error"
    json.dumps(reply.body).encode("ascii")


BAD_COMPLETION = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[0]"),
    ({"prompt": [["a"]]}, "prompt[0]"),
    ({"prompt": ["x", ""]}, "prompt[1]"),
    ({"prompt": ["x"] * 17}, "prompt"),
    ({"prompt": "half \ud83d"}, "prompt"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"echo": True, "logprobs": 0}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": USER}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION, ids=lambda v: str(v)[:50])
def test_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        completion(**fields)
    assert error_reply(caught.value).body["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model": "k3", ]', "offset 16"),
        (b"", "offset 0"),
        (b'{"model": "\xff"}', "not UTF-8 at offset 11"),
        (b"[1]", "array"),
        (b'{"model": NaN}', "NaN"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"a":' + b"[" * 80 + b"]" * 80 + b"}", "nested deeper"),
        (b'{"a":' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": 1, "b": [{"c": 1, "d": 2, "c": 1}]}', 'key "c" stands twice'),
    ],
    ids=["syntax", "empty", "utf8", "array", "nan", "deep", "deeper", "digits", "double"],
)
def test_broken_json_says_where(body: bytes, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        parse_chat(body, models=MODELS)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_model_is_required_and_must_be_known(parse: Any) -> None:
    body = {"prompt": "x"} if parse is parse_completion else {"messages": USER}
    with pytest.raises(BadRequestError) as missing:
        parse(json.dumps(body).encode(), models=MODELS)
    assert missing.value.fields["param"] == "model"
    with pytest.raises(UnknownModelError) as unknown:
        parse(json.dumps({**body, "model": "gpt"}).encode(), models=MODELS)
    reply = error_reply(unknown.value)
    assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")


def test_standard_fields_become_sampling_params() -> None:
    call = chat(
        temperature=0.3, top_p=0.9, top_k=-1, min_p=0.1, n=2, max_tokens=7, stop="END", seed=-1,
        logprobs=True, top_logprobs=3, presence_penalty=1, frequency_penalty=-1,
        logit_bias={"5": 2, "3": -1}, user="u", stream=True,
        stream_options={"include_usage": True}, response_format={"type": "text"}, tools=[],
    )  # fmt: skip
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.3, 0.9, 0, 0.1,
    )  # fmt: skip
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.logit_bias == ((3, -1.0), (5, 2.0))
    assert (sampling.num_logprobs, call.logprobs) == (3, True)
    assert (call.num_choices, call.max_tokens, call.stop) == (2, 7, ("END",))
    assert call.seed == (1 << 64) - 1
    assert call.stream
    assert call.include_usage


def test_null_means_default() -> None:
    call = chat(max_tokens=None, temperature=None, stop=None, n=None, seed=None, stream=None)
    assert call.max_tokens is None
    assert call.seed is None
    assert call.num_choices == 1
    assert call.sampling.temperature == 1.0


def test_prompt_shapes() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))


def test_text_parts_stay_apart_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "developer", "content": parts}, *USER])
    assert [(m.role, m.content) for m in call.messages] == [
        ("system", ("a", "b")), ("user", ("hi",)),
    ]  # fmt: skip


def test_digest_ignores_delivery_only() -> None:
    assert chat(stream=True).digest == chat().digest
    assert chat(seed=1).digest != chat().digest


def test_context_limit_names_the_prompt_or_max_tokens() -> None:
    fit = {"context": 10, "default": 256, "param": "messages"}
    assert fit_max_tokens(None, num_prompt_tokens=4, **fit) == 6
    assert fit_max_tokens(3, num_prompt_tokens=4, **fit) == 3
    with pytest.raises(ContextLengthError) as long:
        fit_max_tokens(None, num_prompt_tokens=10, **fit)
    assert error_reply(long.value).body["error"]["code"] == "context_length_exceeded"
    assert long.value.fields["param"] == "messages"
    with pytest.raises(ContextLengthError) as many:
        fit_max_tokens(7, num_prompt_tokens=4, **fit)
    assert many.value.fields["param"] == "max_tokens"


def test_overload_says_when_to_come_back() -> None:
    reply = error_reply(CapacityError("full", remedy="retry", retry_after_s=2.5))
    assert reply.status == 429
    assert reply.headers["Retry-After"] == "3"


def test_unknown_exceptions_say_nothing_of_themselves() -> None:
    reply = error_reply(ValueError("secret path"))
    assert reply.status == 500
    assert "secret" not in json.dumps(reply.body)
