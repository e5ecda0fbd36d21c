"""OpenAI's messages as values, and the exact place of everything that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from k3ray.errors import BadRequestError
from k3ray.text.chat import ToolCall
from k3ray.text.chat_reader import read_messages, read_response_format, read_tools

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"k":1}'}}


def calls(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}


BAD: list[tuple[Any, str]] = [
    ("x", "messages[0]"),
    ({"content": "x"}, "messages[0].role"),
    ({"role": "root", "content": "x"}, "messages[0].role"),
    ({"role": ["user"], "content": "x"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": 7}, "messages[0].content"),
    ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "poem"}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": "x", "name": 3}, "messages[0].name"),
    ({"role": "user", "content": "x", "nmae": "a"}, "messages[0].nmae"),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
    ({"role": "assistant"}, "messages[0].content"),
    ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
    ({"role": "assistant", "content": "x", "partial": "yes"}, "messages[0].partial"),
    ({"role": "assistant", "content": "", "partial": True, "tool_calls": [CALL]},
     "messages[0].partial"),
    ({"role": "assistant", "tool_calls": {}, "content": "x"}, None),
    ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls"),
    ({"role": "assistant", "tool_calls": [{"type": "x"}]}, "messages[0].tool_calls[0].type"),
    (calls(name=None), "messages[0].tool_calls[0].function.name"),
    (calls(name=7), "messages[0].tool_calls[0].function.name"),
    (calls(arguments=[1]), "messages[0].tool_calls[0].function.arguments"),
    ({"role": "system", "content": "x", "tools": [CALL]}, "messages[0].content"),
    ({"role": "system", "tools": [{}]}, "messages[0].tools[0].function"),
    ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages[0].tool_call_id"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "place"), BAD, ids=lambda value: str(value)[:60])
def test_bad_messages_name_the_place(message: Any, place: str | None) -> None:
    if place is None:
        assert read_messages([message])[0].tool_calls == ()
        return
    with pytest.raises(BadRequestError) as caught:
        read_messages([message])
    assert caught.value.fields["param"] == place


def test_an_image_is_refused_with_its_reason() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(BadRequestError, match="computes text only"):
        read_messages([{"role": "user", "content": [part]}])


def test_only_the_last_message_may_be_partial() -> None:
    partial = {"role": "assistant", "content": "x", "partial": True}
    assert read_messages([partial])[0].partial
    with pytest.raises(BadRequestError) as caught:
        read_messages([partial, {"role": "user", "content": "y"}])
    assert caught.value.fields["param"] == "messages[0].partial"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, {}),
        ("", {}),
        (" \n", {}),
        ('{"a": [1, null]}', {"a": [1, None]}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', '{"a": '),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", '{"a": ' + "[" * 70 + "]" * 70 + "}"),
        ('{"a": 1' + "0" * 5000 + "}", '{"a": 1' + "0" * 5000 + "}"),
        ('{"a": 1e400}', '{"a": 1e400}'),
        ("[1]", "[1]"),
        ("null", "null"),
        ('"no \\"object\\""', 'no "object"'),  # as the answer's parser gives it
    ],
    ids=lambda value: str(value)[:24],
)
def test_arguments_are_strict_json_or_stay_text(arguments: Any, expected: Any) -> None:
    message = read_messages([calls(arguments=arguments)])[0]
    assert message.tool_calls == (ToolCall(tool="f", arguments=expected),)


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "reasoning_content": "why", "tool_calls": [CALL],
    }  # fmt: skip
    message = read_messages([answer])[0]
    assert message.reasoning == "why"
    assert message.tool_calls == (ToolCall(tool="f", arguments={"k": 1}, call_id="a"),)


@pytest.mark.parametrize(
    ("function", "place"),
    [
        ({"strict": True}, "strict"),
        ({"strict": "yes"}, "strict"),
        ({"description": 3}, "description"),
        ({"name": "two words"}, "name"),
        ({"parameters": []}, "parameters"),
        ({"parameters": {"type": "array"}}, "parameters.type"),
        ({"parameters": {"type": "objekt"}}, "parameters.type"),
        ({"parameters": {"properties": []}}, "parameters.properties"),
        ({"parameters": {"properties": {"a": {"type": 3}}}}, "parameters.properties.a.type"),
        ({"parameters": {"required": "a"}}, "parameters.required"),
    ],
)
def test_bad_tools_name_the_place(function: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_tools([{"type": "function", "function": {"name": "f", **function}}])
    assert refused.value.fields["param"] == f"tools[0].function.{place}"


def test_two_tools_of_one_name_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(BadRequestError, match=r"tools\[1\].function.name"):
        read_tools([tool, tool])


def test_bounds_and_formats() -> None:
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(129)]
    assert len(read_tools(tools[:128])) == 128
    with pytest.raises(BadRequestError, match="0 to 128"):
        read_tools(tools)
    with pytest.raises(BadRequestError, match="an object"):
        read_response_format("json_object")
    assert read_response_format({"type": "text"}) is None
