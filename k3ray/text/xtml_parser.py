"""Reading the model's own XTML as it streams: tokens to channel text and tool calls.

A state machine over tokens, so that streaming gives exactly what the whole would. It starts inside
the channel that the prompt left open and ends at `<|end_of_msg|>`. Only control *tokens* structure
the text; what merely looks like them is text. It never fails: a closing tag closes every element
inside it, one that closes nothing is ignored, an argument or a call that begins closes the one
before it, and text outside channels and arguments is not shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from k3ray.text.chat import Channel
from k3ray.text.detokenize import IncrementalDetokenizer
from k3ray.text.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP
from k3ray.text.strict_json import finite_float
from k3ray.text.tokenizer import K3Tokenizer

_CALL, _ARGUMENT, _JSON = "call", "argument", "json"
_CHANNELS = frozenset(Channel)
_NO_JSON = object()
_ATTRIBUTE = re.compile(r'\s([^\s="]+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelText:
    """New text of one channel."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """A tool call begins (`tool` is its name), or its arguments grow by `arguments`, JSON text.

    Args:
        index: Number of the call in this answer, from 0.
    """

    index: int
    tool: str | None = None
    arguments: str = ""


Found = ChannelText | CallText


class AnswerParser:
    """Parses one answer.

    Args:
        tokenizer: The model's.
        channel: The channel that the prompt left open.
    """

    def __init__(self, tokenizer: K3Tokenizer, *, channel: Channel = Channel.RESPONSE) -> None:
        self._tokenizer = tokenizer
        self._controls = {tokenizer.special(name): name for name in (OPEN, CLOSE, SEP, END_OF_MSG)}
        self._elements: list[str] = ["message", channel]
        self._tag: str | None = None
        self._tag_text = ""
        self._decoder = IncrementalDetokenizer(tokenizer)
        self._call: _Call | None = None
        self._found: list[Found] = []
        self.num_calls = 0
        self.done = False

    def feed(self, tokens: Iterable[int]) -> list[Found]:
        """What is new, in order; tokens after the end of the message are ignored."""
        for token in tokens:
            if self.done:
                break
            self._take(token)
        return self._taken()

    def finish(self) -> list[Found]:
        """What the unfinished character at the end decodes to; the stream is over.

        Arguments that a limit cut off stay cut off.
        """
        if not self.done and self._tag is None:
            self._text(self._decoder.finish())
        if self._call is not None:
            self._grow(self._call.cut_off())
        self.done = True
        return self._taken()

    def _taken(self) -> list[Found]:
        found, self._found = self._found, []
        return found

    def _take(self, token: int) -> None:
        control = self._controls.get(token)
        if control is None:
            self._characters(self._decoder.feed((token,)))
            return
        self._characters(self._decoder.finish())
        self._decoder = IncrementalDetokenizer(self._tokenizer)
        if control == SEP:
            self._end_tag()
        elif control == END_OF_MSG:
            self._close_until(0)
            self.done = True
        else:
            self._tag, self._tag_text = control, ""

    def _characters(self, text: str) -> None:
        if self._tag is None:
            self._text(text)
        else:
            self._tag_text += text

    def _end_tag(self) -> None:
        """A `<|sep|>` without an open tag is a stray and changes nothing."""
        name, space, attributes = self._tag_text.partition(" ")
        if self._tag == OPEN:
            self._open(name, _attributes(space + attributes))
        elif self._tag == CLOSE and name in self._elements:
            self._close_until(_last(self._elements, name))
        self._tag = None

    def _open(self, name: str, attributes: dict[str, str]) -> None:
        if name in (_CALL, _ARGUMENT, _JSON):
            for left_open in (_CALL,) if name == _CALL else (_ARGUMENT, _JSON):
                if left_open in self._elements:
                    self._close_until(_last(self._elements, left_open))
        self._elements.append(name)
        if name == _CALL:
            self._call = _Call(self.num_calls)
            self.num_calls += 1
            tool = attributes.get("tool", "")
            self._found.append(CallText(index=self._call.index, tool=tool))
        elif name == _ARGUMENT and self._call is not None:
            self._grow(self._call.open_argument(attributes))
        elif name == _JSON and self._call is not None:
            self._call.open_block()

    def _close_until(self, size: int) -> None:
        """Close elements, the innermost first, until `size` are left."""
        while len(self._elements) > size:
            name = self._elements.pop()
            if self._call is None:
                continue
            if name == _ARGUMENT:
                self._grow(self._call.close_argument())
            elif name == _CALL:
                self._grow(self._call.close())
                self._call = None

    def _text(self, text: str) -> None:
        inside = self._elements[-1] if self._elements else ""
        if not text:
            return
        if inside in _CHANNELS:
            self._found.append(ChannelText(channel=Channel(inside), text=text))
        elif self._call is not None and inside == _ARGUMENT:
            self._grow(self._call.argument_text(text))
        elif self._call is not None and inside == _JSON:
            self._call.block_text(text)

    def _grow(self, arguments: str) -> None:
        if arguments and self._call is not None:
            self._found.append(CallText(index=self._call.index, arguments=arguments))


class _Call:
    """One call's arguments as JSON text that only grows.

    Strings grow with their text (a long one must not look like silence); other values wait for
    their closing tag, and what is not JSON then becomes a string. A call has either arguments or
    one block of JSON text; what comes first decides, the other is not shown. A block waits for the
    end of the call: an object is given as it is, anything else as one JSON string.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._block: str | None = None
        self._num_arguments = 0
        self._value: str | None = None

    def open_block(self) -> None:
        if not self._num_arguments and self._block is None:
            self._block = ""

    def block_text(self, text: str) -> None:
        if self._block is not None:
            self._block += text

    def cut_off(self) -> str:
        return self._block or ""

    def open_argument(self, attributes: dict[str, str]) -> str:
        if self._block is not None:
            return ""
        lead = "," if self._num_arguments else "{"
        self._num_arguments += 1
        is_string = attributes.get("type", "string") == "string"
        self._value = None if is_string else ""
        return lead + _quoted(attributes.get("key", "")) + ":" + ('"' if is_string else "")

    def argument_text(self, text: str) -> str:
        if self._block is not None:
            return ""
        if self._value is None:
            return _quoted(text)[1:-1]
        self._value += text
        return ""

    def close_argument(self) -> str:
        if self._block is not None:
            return ""
        if self._value is None:
            return '"'
        return self._value if _parsed(self._value) is not _NO_JSON else _quoted(self._value)

    def close(self) -> str:
        if self._num_arguments:
            return "}"
        if self._block is None or not self._block.strip():
            return "{}"
        is_object = isinstance(_parsed(self._block), dict)
        return self._block if is_object else _quoted(self._block)


def _attributes(text: str) -> dict[str, str]:
    return {
        key: value.replace("&quot;", '"').replace("&amp;", "&")
        for key, value in _ATTRIBUTE.findall(text)
    }


def _last(elements: list[str], name: str) -> int:
    """Position of the innermost element of this name."""
    return len(elements) - 1 - elements[::-1].index(name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> object:
    """The value of a JSON text; `_NO_JSON` for anything else, a number beyond floats included."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=finite_float)
    except (ValueError, RecursionError):
        return _NO_JSON


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
