"""`prompt` of a completion: a string, token ids, or an array of either, checked by hand."""

from __future__ import annotations

from typing import Any

from k3ray.text.strict_json import bad_field, json_kind, shown

MAX_PROMPTS = 16


def read_prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Check `prompt`.

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
