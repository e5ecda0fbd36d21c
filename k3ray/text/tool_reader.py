"""One tool of a client: a function with a name and, if it takes arguments, a JSON Schema of them.

Also the small readers that messages and tools share. Every complaint names the exact place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError

from k3ray.text.strict_json import bad_field, json_kind, shown

MAX_NAME_CHARS = 256
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
"""OpenAI's characters and those of namespaced tools (`server.tool`, `server:tool`, `a/b`)."""


def read_tool(value: Any, place: str) -> Mapping[str, Any]:
    """Check one entry of `tools`; it comes back unchanged, since the model reads it as it is.

    Raises:
        BadRequestError: no function, a name or description of the wrong form, `parameters` that
            are no JSON Schema of an object, or `strict: true`, which needs constrained decoding.
    """
    function = function_of(value, place)
    place = f"{place}.function"
    name = read_name(function, place)
    if not _NAME.fullmatch(name):
        problem = f"is {shown(name)}: only letters, digits and _ - . : / are allowed"
        raise bad_field(f"{place}.name", problem)
    text_at(function, "description", place)
    if function.get("strict") not in (None, False):
        raise bad_field(
            f"{place}.strict", "arguments are not held to a schema here, it is only shown",
            remedy="send strict: false and check the arguments",
        )  # fmt: skip
    if function.get("parameters") is not None:
        schema = check_schema(function["parameters"], f"{place}.parameters")
        if schema.get("type", "object") != "object":
            raise bad_field(
                f"{place}.parameters.type", f'must be "object", not {shown(schema["type"])}'
            )
    tool: Mapping[str, Any] = value
    return tool


def check_schema(value: Any, place: str) -> Mapping[str, Any]:
    """Check a JSON Schema against draft 2020-12.

    Raises:
        BadRequestError: it is no object, or a keyword holds what it may not (its place is named).
    """
    if not isinstance(value, dict):
        raise bad_field(place, f"must be a JSON Schema, not {json_kind(value)}")
    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        raise bad_field(
            ".".join((place, *map(str, error.absolute_path))),
            f"is not valid in a JSON Schema: {shown(error.instance)}",
        ) from None
    return value


def function_of(value: Any, place: str) -> Mapping[str, Any]:
    """The `function` of a tool or a tool call."""
    if object_at(value, place).get("type", "function") != "function":
        raise bad_field(f"{place}.type", f'must be "function", not {shown(value["type"])}')
    return object_at(value.get("function"), f"{place}.function")


def read_name(fields: Mapping[str, Any], place: str) -> str:
    """The `name` of a tool's function."""
    name = text_at(fields, "name", place)
    if not name or len(name) > MAX_NAME_CHARS:
        raise bad_field(f"{place}.name", f"must have 1 to {MAX_NAME_CHARS} characters")
    return name


def object_at(value: Any, place: str) -> Mapping[str, Any]:
    """`value` if it is an object."""
    if not isinstance(value, dict):
        raise bad_field(place, f"must be an object, not {json_kind(value)}")
    return value


def text_at(fields: Mapping[str, Any], key: str, place: str) -> str | None:
    """The string under `key`; None when there is none."""
    found = fields.get(key)
    if found is not None and not isinstance(found, str):
        raise bad_field(f"{place}.{key}", f"must be a string, not {json_kind(found)}")
    return found
