"""Reading answers: channels, calls, and answers that are not well formed."""

from __future__ import annotations

import json

import pytest

from k3ray.text.chat import Channel
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.xtml_parser import AnswerParser, CallText
from tests.support.whole_answer import joined

TOKENIZER = K3Tokenizer.byte_level()
CONTROLS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def tokens_of(*parts: str) -> list[int]:
    """Parts that name a control token become it, others are encoded."""
    return [
        token
        for part in parts
        for token in ([TOKENIZER.special(part)] if part in CONTROLS else TOKENIZER.encode(part))
    ]


def opened(name: str) -> tuple[str, str, str]:
    return ("<|open|>", name, "<|sep|>")


def closed(name: str) -> tuple[str, str, str]:
    return ("<|close|>", name, "<|sep|>")


ANSWER = tokens_of(
    "because \u4e16", *closed("think"), *opened("response"), "yes \U0001f308 <|close|>no",
    *opened("aside"), "hidden", *closed("aside"), "!", *closed("response"), "between",
    *opened("tools"), "x", *opened('call tool="t&amp;" index="1"'), "y",
    *opened('argument key="a&quot;" type="string"'), 'say "hi"\n\U0001f308', *closed("argument"),
    *opened('argument key="b" type="number"'), "1.50", *closed("argument"),
    *opened('argument key="c" type="object"'), '{"d": [1]', *closed("argument"),
    *closed("call"), *opened('call tool="u" index="2"'), *closed("call"),
    *opened('call tool="v" index="3"'), *opened('json type="object"'), '{"raw', *closed("json"),
    *closed("call"), *closed("tools"), *closed("message"), "<|end_of_msg|>", "after",
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_answers_stream_like_the_whole(size: int) -> None:
    parser = AnswerParser(TOKENIZER, channel=Channel.THINK)
    found = [
        part for at in range(0, len(ANSWER), size) for part in parser.feed(ANSWER[at : at + size])
    ]
    assert parser.done
    result = joined(found + parser.finish())
    assert result["think"] == "because \u4e16"
    assert result["response"] == "yes \U0001f308 <|close|>no!"
    (tool, arguments), second, third = result["calls"]
    assert tool == "t&"
    assert arguments.endswith('"b":1.50,"c":"{\\"d\\": [1]"}')
    assert json.loads(arguments)['a"'] == 'say "hi"\n\U0001f308'
    assert (second, third) == (("u", "{}"), ("v", '"{\\"raw"'))
    assert parser.num_calls == 3


def test_long_strings_grow_token_by_token() -> None:
    head = tokens_of(*opened("tools"), *opened('call tool="t"'), *opened('argument key="a"'))
    parser = AnswerParser(TOKENIZER)
    parser.feed(head)
    for character in "abc":
        assert parser.feed(character.encode()) == [CallText(index=0, arguments=character)]


def test_an_answer_that_is_cut_off_shows_all_its_text() -> None:
    parser = AnswerParser(TOKENIZER)
    found = parser.feed([*b"ab", 0xE4])
    assert not parser.done
    assert joined(found + parser.finish())["response"] == "ab\ufffd"


def test_a_call_that_is_cut_off_stays_cut_off() -> None:
    parser = AnswerParser(TOKENIZER)
    cut = tokens_of(*opened("tools"), *opened('call tool="t"'), *opened('argument key="a"'), "b")
    assert joined(parser.feed(cut) + parser.finish())["calls"] == [("t", '{"a":"b')]


@pytest.mark.parametrize(
    ("parts", "think", "response", "calls"),
    [
        # strays: separators alone, closing tags of nothing
        (("<|sep|>", "a", "<|close|>", "<|close|>", "<|sep|>", "b", *closed("x"), "c"),
         "", "abc", []),
        # the thinking is not closed before the answer, or before the tools
        ((*opened("think"), "t", *opened("response"), "r", *closed("message"), "out"),
         "t", "r", []),
        ((*opened("think"), "t", *opened("tools"), *opened('call tool="f"'), "<|end_of_msg|>"),
         "t", "", [("f", "{}")]),
        # arguments and calls that are not closed
        ((*opened("tools"), *opened('call tool="f"'), *opened('argument key="a" type="number"'),
          "1", *opened('argument key="b"'), "2", *opened('call tool="g"'), *closed("message"),
          "<|end_of_msg|>"),
         "", "", [("f", '{"a":1,"b":"2"}'), ("g", "{}")]),
        # no name, no key, no quotes
        ((*opened("call"), *opened("argument"), "x", *closed("call"), *opened("call tool=f"),
          *closed("call")),
         "", "", [("", '{"":"x"}'), ("", "{}")]),
        # a value that is no JSON, and a number that Python would take
        ((*opened('call tool="f"'), *opened('argument key="a" type="number"'), "NaN",
          *closed("argument"), *opened('argument key="b" type="boolean"'), *closed("call")),
         "", "", [("f", '{"a":"NaN","b":""}')]),
        # an argument and a block in one call: what comes first
        ((*opened('call tool="f"'), *opened("json"), "[", *closed("json"),
          *opened('argument key="a"'), "x", *closed("call"), *opened('call tool="g"'),
          *opened('argument key="a"'), "x", *opened("json"), "[", *closed("call")),
         "", "", [("f", '"["'), ("g", '{"a":"x"}')]),
        # arguments outside a call
        ((*opened('argument key="a"'), "x", *closed("argument"), "y"), "", "y", []),
    ],
)  # fmt: skip
def test_answers_that_are_not_well_formed(
    parts: tuple[str, ...], think: str, response: str, calls: list[tuple[str, str]]
) -> None:
    parser = AnswerParser(TOKENIZER)
    found = parser.feed(tokens_of(*parts))
    result = joined(found + parser.finish())
    assert result == {"think": think, "response": response, "calls": calls}
