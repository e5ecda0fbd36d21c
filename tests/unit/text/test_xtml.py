"""XTML: the exact text of every kind of message, its control tokens, and the loss mask."""

from __future__ import annotations

from typing import Any

import pytest

from k3ray.errors import BadRequestError
from k3ray.text.chat import (
    Channel,
    ChatMessage,
    Effort,
    ResponseFormat,
    ToolChoice,
    TurnOptions,
)  # fmt: skip
from k3ray.text.chat_reader import read_messages
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.xtml import RenderedChat, render_chat

TOKENIZER = K3Tokenizer.byte_level()


def rendered(
    messages: list[dict[str, Any]], generation_prompt: bool = True, **options: Any
) -> RenderedChat:
    return render_chat(
        read_messages(messages), tokenizer=TOKENIZER, options=TurnOptions(**options),
        generation_prompt=generation_prompt,
    )  # fmt: skip


def shown(messages: list[dict[str, Any]], **options: Any) -> str:
    return TOKENIZER.decode(rendered(messages, **options).tokens, skip_special=False)


def opened(name: str) -> str:
    return f"<|open|>{name}<|sep|>"


def closed(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


def element(name: str, body: str, attributes: str = "") -> str:
    return opened(name + attributes) + body + closed(name)


def message(attributes: str, body: str) -> str:
    return element("message", body, f" {attributes}") + "<|end_of_msg|>"


def system(kind: str, body: str) -> str:
    return message(f'role="system" type="{kind}"', body)


PROMPT = opened('message role="assistant"')
HI = {"role": "user", "content": "Hi"}
SAID_HI = message('role="user"', "Hi")
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "날씨", "parameters": {"type": "object"}},
}
WEATHER_JSON = (
    '[{"function":{"description":"날씨","name":"get_weather","parameters":{"type":"object"}},'
    '"type":"function"}]'
)


def test_one_turn_without_thinking() -> None:
    assert shown([HI]) == SAID_HI + PROMPT + opened("response")


def test_conversation_with_thinking_keeps_reasoning() -> None:
    text = shown(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": 'x"&y',
             "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "reasoning_content": "why"},
            {"role": "assistant", "content": "d", "reasoning_content": " \n"},
        ],
        thinking=True,
    )  # fmt: skip
    assert text == (
        message('role="system"', "Be brief.")
        + message('role="user" name="x&quot;&amp;y"', "ab")
        + message('role="assistant"', element("think", "why") + element("response", "c"))
        + message('role="assistant"', element("think", "") + element("response", "d"))
        + PROMPT + opened("think")
    )  # fmt: skip


def test_without_thinking_the_reasoning_is_left_out() -> None:
    text = shown([HI, {"role": "assistant", "content": "c", "reasoning_content": "why"}, HI])
    assert "why" not in text
    assert "think" not in text


def test_every_piece_of_a_tag_is_encoded_on_its_own() -> None:
    tokenizer = K3Tokenizer.from_merges(
        [("=", '"'), ('="', "&"), ("a", "b")],
        vocab_size=600,
    )
    message = {
        "role": "user", "name": "&",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }  # fmt: skip
    tokens = render_chat(read_messages([message]), tokenizer=tokenizer).tokens
    equals = tokenizer.encode('="')
    expected = [tokenizer.special("<|open|>"), *b"message role", *equals, *b'user" name', *equals]
    expected += [*b'&amp;"', tokenizer.special("<|sep|>"), *b"ab", tokenizer.special("<|close|>")]
    assert list(tokens[: len(expected)]) == expected
    assert [len(tokenizer.encode(text)) for text in ('="&', "ab")] == [1, 1], "merges not taken"


def test_options_before_and_after_the_input() -> None:
    effort = (
        "`thinking_effort` guides on how much to think in your thinking channel (not including "
        "the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        "Now the system is invoked with `thinking_effort=low`."
    )
    declared = (
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
        f"```json\n{WEATHER_JSON}\n```"
    )
    required = (
        "The system is invoked with `tool_choice=required`.\n"
        "You MUST call tools in the next message."
    )
    wanted = (
        "The system is invoked with `response_format=json_object`.\nYour response must be raw JSON "
        "data without markdown code blocks (```json) or any additional formatting."
    )
    text = shown(
        [HI], thinking=True, effort=Effort.LOW, tools=(WEATHER,),
        tool_choice=ToolChoice.REQUIRED, response_format=ResponseFormat(),
    )  # fmt: skip
    assert text == (
        system("tool-declare", declared) + system("thinking-effort", effort) + SAID_HI
        + system("tool-choice", required) + system("response-format", wanted)
        + PROMPT + opened("think")
    )  # fmt: skip


def test_tool_choice_none_and_a_schema() -> None:
    text = shown(
        [HI], tool_choice=ToolChoice.NONE,
        response_format=ResponseFormat(schema={"b": 1, "a": {"d": 2, "c": []}}),
    )  # fmt: skip
    assert "`tool_choice=none`.\nYou MUST NOT call any tools in the next message." in text
    assert "`response_format=json_schema`.\nYour response must be raw JSON" in text
    assert (
        "any additional formatting.\nThe JSON data must match the following schema:\n"
        '```json\n{"a":{"c":[],"d":2},"b":1}\n```<|close|>'
    ) in text


def test_tools_declared_later() -> None:
    text = shown([HI, {"role": "system", "tools": [WEATHER]}, HI])
    more = (
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        f"Here are the specs for the extended tools.\n\n```json\n{WEATHER_JSON}\n```"
    )
    assert text == (SAID_HI + system("tool-declare", more) + SAID_HI + PROMPT + opened("response"))


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_typed_arguments() -> None:
    arguments = '{"s":"a\\"b","n":1.50,"t":true,"z":null,"o":{"k": [1]},"a":[1,"x"]}'
    text = shown(
        [{"role": "assistant", "content": "", "tool_calls": [
            call("f", arguments, "1"), call("g&", "{}", "2"), call("h", '{"broken', "3"),
        ]}],
        generation_prompt=False,
    )  # fmt: skip
    typed = [
        ("s", "string", 'a"b'), ("n", "number", "1.5"), ("t", "boolean", "true"),
        ("z", "null", "null"), ("o", "object", '{"k": [1]}'), ("a", "array", '[1, "x"]'),
    ]  # fmt: skip
    first = "".join(
        element("argument", body, f' key="{key}" type="{kind}"') for key, kind, body in typed
    )
    calls = (
        element("call", first, ' tool="f" index="1"')
        + element("call", "", ' tool="g&amp;" index="2"')
        + element("call", element("json", '{"broken', ' type="object"'), ' tool="h" index="3"')
    )
    assert text == message('role="assistant"', element("response", "") + element("tools", calls))


def results(*ids: str | None) -> list[dict[str, Any]]:
    asked = [call("f", "{}", "a"), call("g", "{}", "b")]
    return [
        {"role": "assistant", "tool_calls": asked},
        *({"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in ids),
    ]


def test_tool_results_in_the_order_of_the_calls() -> None:
    text = shown(results("b", "a"), generation_prompt=False)
    assert text.endswith(
        message('role="tool" tool="f" index="1"', "of a")
        + message('role="tool" tool="g" index="2"', "of b")
    )


def test_results_that_match_no_call_stay_where_they_are() -> None:
    text = shown(results("b", "other"), generation_prompt=False)
    assert text.endswith(
        message('role="tool" tool="f" index="1"', "of b")
        + message('role="tool" tool="g" index="2"', "of other")
    )
    alone = [{"role": "tool", "name": "add", "content": "42"}]
    assert shown(alone, generation_prompt=False) == message(
        'role="tool" tool="add" index="1"', "42"
    )
    with pytest.raises(BadRequestError) as caught:
        shown([*results("a", "b"), {"role": "tool", "tool_call_id": "c", "content": "?"}])
    assert caught.value.fields["param"] == "messages[3].tool_call_id"


@pytest.mark.parametrize(
    ("fields", "thinking", "end", "channel"),
    [
        ({"content": "The ans"}, False, opened("response") + "The ans", Channel.RESPONSE),
        ({"content": "The ans"}, True,
         element("think", "") + opened("response") + "The ans", Channel.RESPONSE),
        ({"content": "", "reasoning_content": "hm"}, True, opened("think") + "hm", Channel.THINK),
    ],
)  # fmt: skip
def test_a_partial_message_stays_open(
    fields: dict[str, Any], thinking: bool, end: str, channel: Channel
) -> None:
    partial = {"role": "assistant", "partial": True, **fields}
    chat = rendered([HI, partial], thinking=thinking)
    assert TOKENIZER.decode(chat.tokens, skip_special=False) == SAID_HI + PROMPT + end
    assert chat.channel is channel


def test_only_the_last_assistant_message_may_be_partial() -> None:
    for messages in (
        [ChatMessage(role="assistant", partial=True), ChatMessage(role="user")],
        [ChatMessage(role="user", partial=True)],
    ):
        with pytest.raises(BadRequestError, match="partial"):
            render_chat(messages, tokenizer=TOKENIZER)


def test_the_loss_mask_covers_what_the_model_writes() -> None:
    messages = [
        HI,
        {"role": "assistant", "content": "", "reasoning_content": "r",
         "tool_calls": [call("f", '{"k": 1}', "a")]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "assistant", "content": "one"},
    ]  # fmt: skip
    chat = rendered(messages, thinking=True, effort=Effort.MAX)
    trained = [token for token, kept in zip(chat.tokens, chat.trained, strict=True) if kept]
    argument = element("argument", "1", ' key="k" type="number"')
    asked = element("tools", element("call", argument, ' tool="f" index="1"'))
    ended = closed("message") + "<|end_of_msg|>"
    assert TOKENIZER.decode(trained, skip_special=False) == (
        element("think", "r") + element("response", "") + asked + ended
        + element("think", "") + element("response", "one") + ended
    )  # fmt: skip


def test_values_that_are_no_json_are_refused() -> None:
    bad = read_messages([{"role": "assistant", "tool_calls": [call("f", "{}", "a")]}])
    asked = bad[0].tool_calls[0]
    for value in (float("inf"), float("nan"), {1, 2}):
        broken = ChatMessage(
            role="assistant",
            tool_calls=(type(asked)(tool="f", arguments={"k": value}),),
        )
        with pytest.raises(BadRequestError, match=r"messages\[0\].tool_calls\[0\].k"):
            render_chat([broken], tokenizer=TOKENIZER)
