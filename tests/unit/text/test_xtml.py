"""XTML: what is rendered, and reading it back in channels."""

from __future__ import annotations

from typing import Any

import pytest

from k3ray.errors import BadRequestError
from k3ray.text.channels import Channel, ChannelSplitter, ChannelText
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.xtml import render_chat

TOKENIZER = K3Tokenizer.byte_level()


def shown(messages: list[dict[str, Any]], **options: Any) -> str:
    tokens = render_chat(messages, tokenizer=TOKENIZER, **options)
    return TOKENIZER.decode(tokens, skip_special=False)


def opened(name: str) -> str:
    return f"<|open|>{name}<|sep|>"


def closed(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


PROMPT = opened('message role="assistant"')
ENDED = closed("message") + "<|end_of_msg|>"


def test_one_turn_without_thinking() -> None:
    assert shown([{"role": "user", "content": "Hi"}]) == (
        opened('message role="user"') + "Hi" + ENDED + PROMPT + opened("response")
    )


def test_conversation_with_thinking_keeps_reasoning() -> None:
    text = shown(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "name": 'x"&y',
             "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "reasoning_content": "why"},
            {"role": "assistant", "content": "d"},
        ],
        thinking=True,
    )  # fmt: skip
    assert text == (
        opened('message role="system"') + "Be brief." + ENDED
        + opened('message role="user" name="x&quot;&amp;y"') + "ab" + ENDED
        + PROMPT + opened("think") + "why" + closed("think")
        + opened("response") + "c" + closed("response") + ENDED
        + PROMPT + opened("think") + closed("think")
        + opened("response") + "d" + closed("response") + ENDED
        + PROMPT + opened("think")
    )  # fmt: skip


def test_tools_and_tool_results() -> None:
    text = shown(
        [{"role": "tool", "content": "42", "tool": "add", "index": 1}],
        tools=[{"b": 1, "a": {"d": 2, "c": 3}}],
        generation_prompt=False,
    )
    assert text.startswith(opened('message role="system" type="tool-declare"') + "# Tools\n")
    assert '```json\n[{"a":{"c":3,"d":2},"b":1}]\n```' + ENDED in text
    assert text.endswith(opened('message role="tool" tool="add" index="1"') + "42" + ENDED)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "root", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
    ],
)
def test_bad_messages_name_the_place(message: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        render_chat([message], tokenizer=TOKENIZER)
    assert caught.value.fields["param"] == place


def tokens_of(*parts: str) -> list[int]:
    """Parts that name a control token become it, others are encoded."""
    controls = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}
    tokens: list[int] = []
    for part in parts:
        tokens += [TOKENIZER.special(part)] if part in controls else TOKENIZER.encode(part)
    return tokens


ANSWER = tokens_of(
    "because \u4e16", "<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>",
    "yes \U0001f308 <|close|>no", "<|open|>", 'call tool="t"', "<|sep|>", "hidden", "<|close|>",
    "call", "<|sep|>", "!", "<|close|>", "response", "<|sep|>", "between", "<|close|>", "message",
    "<|sep|>", "<|end_of_msg|>", "after",
)  # fmt: skip


def joined(found: list[ChannelText]) -> dict[Channel, str]:
    return {
        channel: "".join(item.text for item in found if item.channel is channel)
        for channel in Channel
    }


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_channels_stream_like_the_whole(size: int) -> None:
    splitter = ChannelSplitter(TOKENIZER, channel=Channel.THINK)
    found: list[ChannelText] = []
    for at in range(0, len(ANSWER), size):
        found += splitter.feed(ANSWER[at : at + size])
    assert splitter.done
    found += splitter.finish()
    assert joined(found) == {
        Channel.THINK: "because \u4e16",
        Channel.RESPONSE: "yes \U0001f308 <|close|>no!",
    }


def test_an_answer_that_is_cut_off_shows_all_its_text() -> None:
    splitter = ChannelSplitter(TOKENIZER)
    found = splitter.feed([*b"ab", 0xE4])
    assert not splitter.done
    assert joined(found + splitter.finish())[Channel.RESPONSE] == "ab\ufffd"


def test_strays_do_not_break_it() -> None:
    stray = tokens_of("<|sep|>", "a", "<|close|>", "<|close|>", "<|sep|>", "b", "<|close|>",
                      "<|sep|>", "<|close|>", "<|sep|>", "c")  # fmt: skip
    splitter = ChannelSplitter(TOKENIZER)
    assert joined(splitter.feed(stray))[Channel.RESPONSE] == "a"
