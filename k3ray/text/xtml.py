"""XTML, K3's chat format: a conversation to tokens, in segments that text can never forge.

    <|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>

Only `_Writer` writes control tokens; texts, tag names and each piece of an attribute are encoded
on their own with special tokens disallowed, so ids equal the release's and merges never cross a
border. No newline between elements, no BOS.
Source: `encoding_k3` of the release (the fixed sentences are its wire format), see the model's
architecture notes, section 10.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from k3ray.errors import BadRequestError
from k3ray.text.chat import (
    NO_OPTIONS,
    Channel,
    ChatMessage,
    Effort,
    ResponseFormat,
    ToolCall,
    ToolChoice,
    TurnOptions,
)  # fmt: skip
from k3ray.text.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP
from k3ray.text.strict_json import json_kind
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.tool_results import TurnMessage, in_call_order

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema."
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel "
    "(not including the response channel), supported values include `low`, `medium`, `high`, "
    "and `max`.\nNow the system is invoked with `thinking_effort={effort}`."
)
_CHOICE = {
    ToolChoice.REQUIRED: "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    ToolChoice.NONE: "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) "
    "or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """Tokens of a conversation, and which of them the model is trained to write.

    Args:
        trained: One flag per token: an assistant message's body with its channel tags, its closing
            tag and `<|end_of_msg|>`, but not the tag that opens it.
        channel: The channel that is open at the end, for the parser of the answer; None without
            a generation prompt.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    channel: Channel | None


def render_chat(
    messages: Sequence[ChatMessage],
    *,
    tokenizer: K3Tokenizer,
    options: TurnOptions = NO_OPTIONS,
    generation_prompt: bool = True,
) -> RenderedChat:
    """The tokens of a conversation, up to where the model goes on.

    Args:
        messages: In order; tool results are sorted into the order of the calls they answer.
        tokenizer: The model's.
        options: What is said besides the messages.
        generation_prompt: End with an open assistant message and an open channel. After a partial
            message its own channel stays open instead.

    Raises:
        BadRequestError: a tool result that answers no call and names no tool, a partial message
            that is not the assistant's last, or an argument that is no JSON value.
    """
    writer = _Writer(tokenizer)
    if options.tools:
        writer.system("tool-declare", _fenced(_TOOLS + "\n\n", options.tools))
    if options.thinking and options.effort is not None:
        writer.system("thinking-effort", _EFFORT.format(effort=Effort(options.effort)))
    channel = None
    for message in in_call_order(messages):
        channel = _message(writer, message, options.thinking, last=message.place == len(messages))
    if options.tool_choice is not None:
        writer.system("tool-choice", _CHOICE[options.tool_choice])
    if options.response_format is not None:
        writer.system("response-format", _format_text(options.response_format))
    if generation_prompt and channel is None:
        writer.open("message", {"role": "assistant"})
        channel = Channel.THINK if options.thinking else Channel.RESPONSE
        writer.open(channel)
    return RenderedChat(tokens=tuple(writer.tokens), trained=tuple(writer.trained), channel=channel)


class _Writer:
    """Collects tokens; the only place where control tokens come from."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self.trained: list[bool] = []
        self.in_answer = False

    def open(self, name: str, attributes: Mapping[str, str] | None = None) -> None:
        self._control(OPEN)
        self.text(name)
        for key, value in (attributes or {}).items():
            for piece in (f" {key}", '="', _escaped(value), '"'):
                self.text(piece)
        self._control(SEP)

    def close(self, name: str) -> None:
        self._control(CLOSE)
        self.text(name)
        self._control(SEP)

    def text(self, text: str) -> None:
        self._extend(self._tokenizer.encode(text))

    def element(self, name: str, attributes: Mapping[str, str], parts: Iterable[str]) -> None:
        self.open(name, attributes)
        for part in parts:
            self.text(part)
        self.close(name)

    def message(self, attributes: Mapping[str, str], parts: Iterable[str]) -> None:
        self.element("message", attributes, parts)
        self._control(END_OF_MSG)

    def end_message(self) -> None:
        self.close("message")
        self._control(END_OF_MSG)

    def system(self, kind: str, body: str) -> None:
        self.message({"role": "system", "type": kind}, (body,))

    def _control(self, name: str) -> None:
        self._extend((self._tokenizer.special(name),))

    def _extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.trained += [self.in_answer] * len(tokens)


def _message(writer: _Writer, turn: TurnMessage, thinking: bool, *, last: bool) -> Channel | None:
    """Write one message; the channel that it leaves open, if it is partial."""
    message = turn.message
    if message.partial and not (last and message.role == "assistant" and not message.tool_calls):
        raise _bad(
            f"messages[{turn.place - 1}].partial",
            "only the last message may be partial, an assistant's without tool calls",
        )
    if message.tools:
        writer.system("tool-declare", _fenced(_MORE_TOOLS + "\n\n", message.tools))
        return None
    attributes = {"role": message.role}
    if message.role == "tool":
        attributes |= {"tool": turn.tool, "index": str(turn.index)}
    elif message.name:
        attributes["name"] = message.name
    if message.role != "assistant":
        writer.message(attributes, message.content)
        return None
    writer.open("message", attributes)
    writer.in_answer = True
    channel = _assistant_body(writer, message, thinking, turn.place - 1)
    if channel is None:
        writer.end_message()
    writer.in_answer = False
    return channel


def _assistant_body(
    writer: _Writer, message: ChatMessage, thinking: bool, place: int
) -> Channel | None:
    if thinking:
        writer.open(Channel.THINK)
        if message.reasoning.strip():
            writer.text(message.reasoning)
        if message.partial and not any(message.content):
            return Channel.THINK
        writer.close(Channel.THINK)
    writer.open(Channel.RESPONSE)
    for part in message.content:
        writer.text(part)
    if message.partial:
        return Channel.RESPONSE
    writer.close(Channel.RESPONSE)
    if message.tool_calls:
        writer.open("tools")
        for index, call in enumerate(message.tool_calls, start=1):
            _call(writer, call, index, f"messages[{place}].tool_calls[{index - 1}]")
        writer.close("tools")
    return None


def _call(writer: _Writer, call: ToolCall, index: int, place: str) -> None:
    writer.open("call", {"tool": call.tool, "index": str(index)})
    if isinstance(call.arguments, str):
        writer.element("json", {"type": "object"}, (call.arguments,))
    else:
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else _json_text(value, f"{place}.{key}")
            writer.element("argument", {"key": key, "type": json_kind(value)}, (text,))
    writer.close("call")


def _json_text(value: object, place: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _bad(place, f"is no JSON value: {error}") from None


def _fenced(text: str, value: object) -> str:
    """A text and a JSON value in compact form, keys sorted at every depth, in a fenced block."""
    written = json.dumps(
        value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False
    )
    return f"{text}```json\n{written}\n```"


def _format_text(wanted: ResponseFormat) -> str:
    if wanted.schema is None:
        return _FORMAT.format(kind="json_object")
    return _fenced(_FORMAT.format(kind="json_schema") + _SCHEMA, wanted.schema)


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _bad(place: str, problem: str) -> BadRequestError:
    return BadRequestError(f"{place}: {problem}", remedy="see docs/howto.md, Chat", param=place)
