"""`messages` and `prompt`: the two inputs that are more than a scalar, checked by hand.

By hand because the message of a failed union says nothing a reader can use. Every complaint names
the exact place, such as `messages[2].content[0].type`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3ray.serve.api_json import bad_field, json_kind, shown

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 4096
MAX_PROMPTS = 16
_KEYS = {"role", "content", "name", "reasoning_content", "refusal", "tool_calls", "annotations"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One checked message; `role` is system, user or assistant."""

    role: str
    content: str
    name: str | None = None
    reasoning: str = ""


def read_messages(value: Any) -> tuple[Message, ...]:
    """Check `messages`.

    Raises:
        BadRequestError: empty, an unknown role, missing or null content, a part that is no text.
    """
    if not isinstance(value, list):
        raise bad_field("messages", f"must be an array, not {json_kind(value)}")
    if not 0 < len(value) <= MAX_MESSAGES:
        raise bad_field("messages", f"has {len(value)} entries, 1 to {MAX_MESSAGES} are needed")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def read_prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Check `prompt`: a string, token ids, or an array of either.

    Raises:
        BadRequestError: empty or of another shape.
    """
    if isinstance(value, str):
        return (_prompt(value, "prompt"),)
    if not isinstance(value, list):
        raise bad_field("prompt", f"must be a string or an array, not {json_kind(value)}")
    if value and all(_is_token(item) for item in value):
        return (tuple(value),)
    if not 0 < len(value) <= MAX_PROMPTS:
        raise bad_field("prompt", f"has {len(value)} entries, 1 to {MAX_PROMPTS} are needed")
    return tuple(_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))


def _prompt(value: Any, place: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value:
            raise bad_field(place, "is empty", remedy="send at least one character")
        return value
    if isinstance(value, list) and value and all(_is_token(item) for item in value):
        return tuple(value)
    raise bad_field(place, f"must be a string or token ids, not {shown(value)}")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise bad_field(place, f"must be an object, not {json_kind(value)}")
    role = value.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        problem = "is required" if "role" not in value else f"{shown(role)} is not one of {known}"
        raise bad_field(f"{place}.role", problem)
    for key in value:
        if key not in _KEYS:
            raise bad_field(f"{place}.{key}", "is not a known field of a message")
    if value.get("tool_calls"):
        raise bad_field(f"{place}.tool_calls", "is not supported yet by this endpoint")
    if "content" not in value:
        raise bad_field(f"{place}.content", "is required")
    return Message(
        role="system" if role == "developer" else role,
        content=_content(value["content"], f"{place}.content"),
        name=_optional_text(value, "name", place),
        reasoning=_optional_text(value, "reasoning_content", place) or "",
    )


def _content(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_field(
            place, f"must be a string or an array of text parts, not {json_kind(value)}"
        )
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(value))


def _part(value: Any, place: str) -> str:
    if not isinstance(value, dict):
        raise bad_field(place, f"must be an object, not {json_kind(value)}")
    if value.get("type") != "text":
        raise bad_field(f"{place}.type", f'only "text" is supported yet, not {value.get("type")!r}')
    if not isinstance(value.get("text"), str):
        raise bad_field(f"{place}.text", f"must be a string, not {json_kind(value.get('text'))}")
    text: str = value["text"]
    return text


def _optional_text(value: dict[str, Any], key: str, place: str) -> str | None:
    found = value.get(key)
    if found is not None and not isinstance(found, str):
        raise bad_field(f"{place}.{key}", f"must be a string, not {json_kind(found)}")
    return found
