"""OpenAI's chat JSON -> values: messages, tools, and the wishes for the next message.

Checked by hand because the message of a failed union says nothing a reader can use. Every complaint
names the exact place, such as `messages[2].content[0].type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from k3ray.text.chat import ChatMessage, ResponseFormat, ToolCall, ToolChoice
from k3ray.text.strict_json import bad_field, json_kind, parse_arguments, shown
from k3ray.text.tool_reader import (
    check_schema,
    function_of,
    object_at,
    read_tool,
    text_at,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_CALLS = 128

_COMMON = {"role", "content", "name"}
_ONLY_NULL = ("refusal", "annotations", "audio", "function_call")
"""What clients send back of an answer; this endpoint never fills them."""
_KEYS: dict[str, set[str]] = {
    "system": _COMMON | {"tools"},
    "developer": _COMMON | {"tools"},
    "user": _COMMON,
    "assistant": _COMMON | {"reasoning_content", "tool_calls", "partial", *_ONLY_NULL},
    "tool": _COMMON | {"tool_call_id", "tool"},
}
_IMAGES = ("image", "image_url", "input_image", "video", "video_url", "input_audio", "file")


def read_messages(value: Any) -> tuple[ChatMessage, ...]:
    """Check `messages`.

    Raises:
        BadRequestError: empty, an unknown role or field, content that is missing or no text.
    """
    messages = _items(value, "messages", MAX_MESSAGES, _message, least=1)
    for index, message in enumerate(messages[:-1]):
        if message.partial:
            raise bad_field(f"messages[{index}].partial", "only the last message may be partial")
    return messages


def read_tools(value: Any, place: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Check `tools`; None and an empty array are no tools.

    Raises:
        BadRequestError: a tool that is no function with a name of its own and a schema, or one
            that asks for constrained decoding (`strict: true`).
    """
    tools = _items([] if value is None else value, place, MAX_TOOLS, read_tool)
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise bad_field(f"{place}[{index}].function.name", f"{shown(name)} is there twice")
    return tools


def read_tool_choice(value: Any) -> ToolChoice | None:
    """Check `tool_choice`; None and "auto" leave the model free.

    Raises:
        BadRequestError: a named tool (K3 has no such form), or anything else.
    """
    if value in (None, "auto"):
        return None
    if value in tuple(ToolChoice):
        return ToolChoice(value)
    raise bad_field(
        "tool_choice", f'{shown(value)} is not one of "auto", "none", "required"',
        remedy="K3 cannot be told which tool to call; use required, with that tool alone",
    )  # fmt: skip


def read_response_format(value: Any) -> ResponseFormat | None:
    """Check `response_format`; None and text are no wish.

    Raises:
        BadRequestError: an unknown type, a schema that is missing, or `strict: true`, which
            would need constrained decoding.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_field("response_format", f"must be an object, not {json_kind(value)}")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return ResponseFormat()
        case "json_schema":
            return _schema(value.get("json_schema"))
        case kind:
            known = '"text", "json_object", "json_schema"'
            raise bad_field("response_format.type", f"{shown(kind)} is not one of {known}")


def _schema(value: Any) -> ResponseFormat:
    place = "response_format.json_schema"
    if not isinstance(value, dict) or value.get("schema") is None:
        raise bad_field(place, "must be an object that holds a `schema`")
    schema = check_schema(value["schema"], f"{place}.schema")
    if value.get("strict"):
        raise bad_field(
            f"{place}.strict", "answers are not held to a schema here, it is only asked for",
            remedy="send strict: false and check the answer",
        )  # fmt: skip
    return ResponseFormat(schema=schema)


def _items(
    value: Any, place: str, most: int, read: Callable[[Any, str], Any], *, least: int = 0
) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise bad_field(place, f"must be an array, not {json_kind(value)}")
    if not least <= len(value) <= most:
        raise bad_field(place, f"has {len(value)} entries, {least} to {most} are needed")
    return tuple(read(item, f"{place}[{index}]") for index, item in enumerate(value))


def _message(value: Any, place: str) -> ChatMessage:
    fields = object_at(value, place)
    role = fields.get("role")
    if not isinstance(role, str) or role not in _KEYS:
        problem = f"{shown(role)} is not one of {', '.join(_KEYS)}"
        raise bad_field(f"{place}.role", problem if "role" in fields else "is required")
    for key, found in fields.items():
        if key not in _KEYS[role]:
            raise bad_field(f"{place}.{key}", f"is not a field of a message with role {role!r}")
        if key in _ONLY_NULL and found not in (None, []):
            raise bad_field(f"{place}.{key}", "is not supported; leave it out")
    name = text_at(fields, "name", place)
    message = ChatMessage(
        role="system" if role == "developer" else role,
        content=_content(fields, place),
        name=name,
        reasoning=text_at(fields, "reasoning_content", place) or "",
        tool_calls=_items(fields.get("tool_calls") or [], f"{place}.tool_calls", MAX_CALLS, _call),
        partial=_flag(fields, "partial", place),
        tools=read_tools(fields.get("tools"), f"{place}.tools"),
        tool=text_at(fields, "tool", place) or (name if role == "tool" else None),
        answers=text_at(fields, "tool_call_id", place),
    )  # fmt: skip
    if message.tools and any(message.content):
        raise bad_field(f"{place}.content", "must be empty beside `tools`")
    if message.partial and message.tool_calls:
        raise bad_field(f"{place}.partial", "a message with tool calls is whole")
    return message


def _content(fields: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """The parts; only an assistant that thinks or calls, and a tool declaration, may have none."""
    value = fields.get("content")
    if value is None:
        if any(fields.get(key) for key in ("tool_calls", "reasoning_content", "tools")):
            return ()
        problem = "must be a string or an array of text parts, not null"
        raise bad_field(f"{place}.content", problem if "content" in fields else "is required")
    place = f"{place}.content"
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise bad_field(
            place, f"must be a string or an array of text parts, not {json_kind(value)}"
        )
    return tuple(_part(part, f"{place}[{index}]") for index, part in enumerate(value))


def _part(value: Any, place: str) -> str:
    kind = object_at(value, place).get("type")
    if kind in _IMAGES:
        raise bad_field(
            f"{place}.type", f"{shown(kind)}: this model computes text only",
            remedy="its vision tower is stored, not computed yet; send text",
        )  # fmt: skip
    if kind != "text":
        raise bad_field(f"{place}.type", f'only "text" is known, not {shown(kind)}')
    if not isinstance(value.get("text"), str):
        raise bad_field(f"{place}.text", f"must be a string, not {json_kind(value.get('text'))}")
    text: str = value["text"]
    return text


def _call(value: Any, place: str) -> ToolCall:
    function = function_of(value, place)
    name = text_at(function, "name", f"{place}.function")
    if name is None:
        raise bad_field(f"{place}.function.name", "is required, as the answer gave it")
    arguments = function.get("arguments")
    place_of = f"{place}.function.arguments"
    if arguments is not None and not isinstance(arguments, str | dict):
        raise bad_field(place_of, f"must be a string of JSON, not {json_kind(arguments)}")
    if not isinstance(arguments, dict):
        arguments = parse_arguments(arguments or "")
    return ToolCall(tool=name, arguments=arguments, call_id=text_at(value, "id", place))


def _flag(fields: Mapping[str, Any], key: str, place: str) -> bool:
    found = fields.get(key)
    if found is not None and not isinstance(found, bool):
        raise bad_field(f"{place}.{key}", f"must be true or false, not {json_kind(found)}")
    return bool(found)
