"""What a chat body says about the next message: thinking, effort, tools, and its form.

Three dialects say whether and how much to think: OpenAI's `reasoning_effort`, Kimi's `thinking`
object, and `chat_template_kwargs`. They may repeat each other, not contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3ray.serve.api_fields import ChatBody
from k3ray.text.chat import ChatMessage, Effort, ToolChoice, TurnOptions
from k3ray.text.chat_reader import read_response_format, read_tool_choice, read_tools
from k3ray.text.strict_json import bad_field, json_kind, shown

_SERVED = (Effort.LOW, Effort.HIGH, Effort.MAX)


def read_turn(
    fields: ChatBody, messages: tuple[ChatMessage, ...]
) -> tuple[bool | None, TurnOptions]:
    """Whether thinking was asked for (None: the endpoint's default), and the options beside it.

    Raises:
        BadRequestError: a field is wrong, contradicts another, or needs tools that are not there.
    """
    thinking, effort = _thinking(fields)
    tools = read_tools(fields.tools)
    choice = read_tool_choice(fields.tool_choice)
    if choice is ToolChoice.REQUIRED and not (tools or any(each.tools for each in messages)):
        raise bad_field("tool_choice", "required needs tools", remedy="declare tools")
    options = TurnOptions(
        effort=effort,
        tools=tools,
        tool_choice=choice,
        response_format=read_response_format(fields.response_format),
    )
    return thinking, options


def _thinking(fields: ChatBody) -> tuple[bool | None, Effort | None]:
    kwargs = _known(
        fields.chat_template_kwargs, "chat_template_kwargs",
        ("thinking", "thinking_effort", "preserve_thinking"),
    )  # fmt: skip
    dialect = _known(fields.thinking, "thinking", ("type", "keep", "effort"))
    if dialect.get("type") not in (None, "enabled", "disabled"):
        raise bad_field("thinking.type", 'must be "enabled" or "disabled"')
    if dialect.get("keep", "all") != "all" or kwargs.get("preserve_thinking", True) is not True:
        raise bad_field("thinking.keep", "K3 always keeps the thinking of earlier messages")
    flags = {
        "thinking.type": None if "type" not in dialect else dialect["type"] == "enabled",
        "chat_template_kwargs.thinking": _flag(kwargs),
        "reasoning_effort": False if fields.reasoning_effort == "none" else None,
    }
    efforts = {
        "reasoning_effort": None if fields.reasoning_effort == "none" else fields.reasoning_effort,
        "thinking.effort": dialect.get("effort"),
        "chat_template_kwargs.thinking_effort": kwargs.get("thinking_effort"),
    }
    effort = _agreed({place: _effort(value, place) for place, value in efforts.items()})
    thinking = _agreed(flags)
    return (True if thinking is None and effort is not None else thinking), effort


def _known(value: Mapping[str, Any] | None, place: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    for key in value or {}:
        if key not in keys:
            raise bad_field(f"{place}.{key}", f"is not one of {', '.join(keys)}")
    return value or {}


def _flag(kwargs: Mapping[str, Any]) -> bool | None:
    value = kwargs.get("thinking")
    if value is not None and not isinstance(value, bool):
        raise bad_field(
            "chat_template_kwargs.thinking", f"must be true or false, not {json_kind(value)}"
        )
    return value


def _effort(value: object, place: str) -> Effort | None:
    if value is None:
        return None
    if value not in tuple(_SERVED):
        known = ", ".join((*(("none",) if place == "reasoning_effort" else ()), *_SERVED))
        raise bad_field(place, f"{shown(value)} is not served", remedy=f"use one of {known}")
    return Effort(str(value))


def _agreed(values: Mapping[str, Any]) -> Any:
    """The one value that the places name."""
    named = {place: value for place, value in values.items() if value is not None}
    if len(set(named.values())) > 1:
        place = list(named)[-1]
        raise bad_field(place, f"contradicts {next(iter(named))}")
    return next(iter(named.values()), None)
