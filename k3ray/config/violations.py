"""Validation errors as sentences: dotted path, what is wrong, what was given, nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_MAX_SHOWN = 60


def describe(cls: type[BaseModel], error: ValidationError) -> list[str]:
    """One sentence per violation of `cls`, in the order of its fields."""
    return [
        _sentence(cls, item["type"], item["loc"], item["msg"], item["input"])
        for item in error.errors(include_url=False, include_context=False)
    ]


def _sentence(
    cls: type[BaseModel], kind: str, loc: tuple[int | str, ...], message: str, given: Any
) -> str:
    path = _dotted(loc)
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_suggestion(cls, loc)}"
    if kind == "missing":
        return f"{path}: required, but not given"
    if kind == "value_error":
        text = message.removeprefix("Value error, ")
        return f"{path}: {text}" if path else text
    shown = repr(given)
    if len(shown) > _MAX_SHOWN:
        shown = shown[:_MAX_SHOWN] + "..."
    return f"{path}: {message[:1].lower()}{message[1:]}, got {shown}"


def _dotted(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _suggestion(cls: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """The nearest known key beside the unknown one, else the same key in another section."""
    models = [cls]
    for part in loc[:-1]:
        if isinstance(part, str):
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            models = [found for field in fields for found in _models_in(field.annotation)] or models
    known = sorted({name for model in models for name in model.model_fields})
    unknown = str(loc[-1])
    elsewhere = [path for path in _paths(cls, ()) if path.rsplit(".", 1)[-1] == unknown]
    if elsewhere:
        return f" (did you mean {elsewhere[0]!r}?)"
    near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {_dotted([*loc[:-1], near[0]])!r}?)"
    return f" (known keys here: {', '.join(known)})"


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models_in(arg)]


def _paths(cls: type[BaseModel], prefix: tuple[str, ...]) -> Iterator[str]:
    for name, field in cls.model_fields.items():
        yield ".".join((*prefix, name))
        for model in _models_in(field.annotation):
            yield from _paths(model, (*prefix, name))
