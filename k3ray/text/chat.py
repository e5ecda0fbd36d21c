"""A conversation as values: messages, tool calls, and the options of one turn.

The reader of OpenAI's JSON (`chat_reader`) makes them, the writer (`xtml`) turns them into tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Channel(StrEnum):
    """The channels of an assistant message that hold text for the reader."""

    THINK = "think"
    RESPONSE = "response"


class Effort(StrEnum):
    """How much to think; the release's text names all four, K3 is served with all but `medium`."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    MAX = "max"


class ToolChoice(StrEnum):
    """What the next message must do about tools; without one the model is free."""

    REQUIRED = "required"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of an assistant message.

    Args:
        call_id: The client's opaque name for it, by which a tool result refers to it.
        arguments: By name, any JSON value; or the text that a client sent and that is no JSON.
    """

    tool: str
    arguments: Mapping[str, Any] | str
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message.

    Args:
        role: system, user, assistant or tool.
        content: Text in parts; each part is encoded on its own, as the release does.
        reasoning: An assistant's thinking; always sent back in thinking mode ("preserved").
        tool_calls: An assistant's.
        partial: A last assistant message that the model goes on writing.
        tools: Schemas that a system message without content adds to the toolset.
        tool: A tool result's tool; None when the call it answers says it.
        answers: The `call_id` that a tool result answers.
    """

    role: str
    content: tuple[str, ...] = ()
    name: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    partial: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    tool: str | None = None
    answers: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """A wish for JSON; `schema` is None for any JSON object. It is asked for, not enforced."""

    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """What holds for a whole conversation (`thinking`, `effort`, `tools`) or for its next message.

    Args:
        thinking: Whether assistant messages have a `think` channel; it is then always there.
        effort: Said to the model in thinking mode; None says nothing.
        tools: JSON schemas of the tools that the model may call.
    """

    thinking: bool = False
    effort: Effort | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None


NO_OPTIONS = TurnOptions()
"""Nothing is asked for."""
