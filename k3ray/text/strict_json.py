"""A client's JSON -> values, or a `BadRequestError` that says where it is wrong.

Stricter than `json.loads`: no key twice, no NaN or Infinity (nor a number that would become one),
no half surrogate pairs (text that no tokenizer and no UTF-8 encoder can take), no nesting that
would exhaust the stack.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from k3ray.errors import BadRequestError

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
_SHOWN = 60


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a request body.

    Raises:
        BadRequestError: not UTF-8, not JSON (the offset is named), not an object, a lone
            surrogate or too deep a nesting (the place is named).
    """
    value = _loads(_decode(body))
    if not isinstance(value, dict):
        raise BadRequestError(
            f"the body is a JSON {json_kind(value)}, an object is needed",
            remedy='send {"model": ..., ...}',
            param=None,
        )
    _check_strings(value)
    return value


def parse_arguments(text: str) -> dict[str, Any] | str:
    """The arguments of a tool call; what is no JSON object comes back as text.

    The answer's parser gives a call whose arguments were no object as one JSON string: that is
    undone, so that what the model wrote comes back to it as it wrote it.
    """
    if not text.strip():
        return {}
    try:
        value = _loads(text)
        if isinstance(value, str):
            _check_text(value, "arguments")
            return value
        if isinstance(value, dict):
            _check_strings(value)
            return value
    except BadRequestError:
        return text
    return text


def finite_float(text: str) -> float:
    """A JSON number as a float.

    Raises:
        ValueError: it is beyond what a float can hold.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:_SHOWN]} is beyond the largest float")
    return value


def json_kind(value: object) -> str:
    """The JSON word for a parsed value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def shown(value: object) -> str:
    """A short, safe rendering of a value for an error message."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def bad_field(param: str, message: str, *, remedy: str = "") -> BadRequestError:
    """The error that names a field."""
    return BadRequestError(f"{param}: {message}", remedy=remedy, param=param)


def _decode(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"the body is not UTF-8 at offset {error.start}", remedy="send UTF-8 JSON", param=None
        ) from None


def _loads(text: str) -> Any:
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=finite_float,
            object_pairs_hook=_without_doubles,
        )
    except json.JSONDecodeError as error:
        raise BadRequestError(
            f"the body is not valid JSON at offset {error.pos} "
            f"(line {error.lineno}, column {error.colno}): {error.msg}",
            remedy="mend the JSON",
            param=None,
            offset=error.pos,
        ) from None
    except RecursionError:
        raise BadRequestError(
            "the JSON is nested too deep", remedy=f"at most {MAX_DEPTH} levels", param=None
        ) from None
    except BadRequestError:  # a ValueError too
        raise
    except ValueError:  # an integer of thousands of digits, or a float beyond the largest
        raise BadRequestError(
            "the JSON holds a number that is too large", remedy="use a smaller number", param=None
        ) from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of `pairs`; two values for one key are a mistake that nobody would notice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise BadRequestError(
            f"the key {shown(double)} stands twice in one object", remedy="send it once",
            param=None,
        )  # fmt: skip
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequestError(
        f"the body holds {name}, which is not JSON", remedy="use finite numbers", param=None
    )


def _check_strings(root: dict[str, Any]) -> None:
    """Walk without recursion; the order of visits does not matter."""
    pending: list[tuple[Any, str, int]] = [(root, "", 0)]
    while pending:
        value, place, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise bad_field(_top(place), f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, str):
            _check_text(value, place)
        elif isinstance(value, list):
            pending.extend((item, f"{place}[{i}]", depth + 1) for i, item in enumerate(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                _check_text(key, place or "body")
                pending.append((item, f"{place}.{key}" if place else key, depth + 1))


def _check_text(text: str, place: str) -> None:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise bad_field(
            place, "holds half of a surrogate pair", remedy="send whole Unicode characters"
        )


def _top(place: str) -> str:
    return place.split(".", 1)[0].split("[", 1)[0]
