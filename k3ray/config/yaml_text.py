"""YAML 1.2 as plain JSON values: the only reader and writer of YAML text in k3ray.

`1e-4` is a number, `on` and dates are strings, duplicate keys are refused. What comes out is
made of dict (string keys), list, str, int, float, bool and None only. Entry points: `parse_yaml`
for documents, `parse_scalar` for the right-hand side of `key=value`, `dump_yaml`.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from k3ray.errors import ConfigError

JsonValue = dict[str, Any] | list[Any] | str | int | float | bool | None

_MAX_DEPTH = 64
_MAX_NODES = 1_000_000
_TAG = "tag:yaml.org,2002:"
_TYPED_TAGS = frozenset(f"{_TAG}{name}" for name in ("null", "bool", "int", "float"))


class _Constructor(SafeConstructor):
    """Safe constructor that keeps timestamps as the text they were written as (YAML 1.2 core)."""

    def construct_timestamp_text(self, node: Node) -> str:
        """The scalar as written."""
        return str(node.value)


_Constructor.add_constructor(f"{_TAG}timestamp", _Constructor.construct_timestamp_text)


class _Representer(SafeRepresenter):
    """Safe representer that writes lists of scalars on one line."""

    def represent_list(self, data: list[Any]) -> SequenceNode:
        """A sequence node, in flow style when no item is itself a collection."""
        flat = not any(isinstance(item, list | dict) for item in data)
        node: SequenceNode = self.represent_sequence(f"{_TAG}seq", data, flow_style=flat)
        return node


_Representer.add_representer(list, _Representer.represent_list)


def parse_yaml(text: str, *, where: str) -> JsonValue:
    """Parse one YAML 1.2 document; an empty one is None.

    Args:
        text: The document.
        where: Name of the source for error messages, such as a file name.

    Raises:
        ConfigError: not YAML, a duplicate key, several documents, a value JSON cannot hold, or
            nesting deeper than 64.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ruamel warns of what we then refuse or accept
            value = _reader().load(text)
        return _Plain().convert(value, 0)
    except MarkedYAMLError as error:
        raise _not_yaml(where, _first_line(error), _place(error)) from error
    except RecursionError as error:
        raise _not_yaml(where, f"nesting deeper than {_MAX_DEPTH}", "") from error
    except (YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _not_yaml(where, str(error).strip().splitlines()[0], "") from error


def parse_scalar(text: str, *, where: str) -> JsonValue:
    """Parse the value of `key=value`: a flow collection or quoted string, else a plain scalar.

    A plain scalar is taken whole (no comments, no `: `), so that a path or sentence is what was
    typed: `parse_scalar("a #1")` is "a #1"; `"1e-4"` is a number; the empty text is None.

    Raises:
        ConfigError: an unfinished flow collection or quoted string.
    """
    text = text.strip()
    if text[:1] in ("[", "{", '"', "'"):
        return parse_yaml(text, where=where)
    tag = _reader().resolver.resolve(ScalarNode, text, (True, False))
    return parse_yaml(text, where=where) if str(tag) in _TYPED_TAGS else text


def dump_yaml(value: JsonValue) -> str:
    """Write JSON values as YAML 1.2 that `parse_yaml` reads back equal; keys keep their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 4096  # a list of scalars stays on its line
    yaml.allow_unicode = True
    out = io.StringIO()
    yaml.dump(value, out)
    return out.getvalue()


def _reader() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return yaml


class _Plain:
    """Converts a parsed tree to plain JSON values, bounded in depth and in nodes (aliases)."""

    def __init__(self) -> None:
        self._nodes = 0

    def convert(self, value: object, depth: int) -> JsonValue:
        self._nodes += 1
        if depth > _MAX_DEPTH:
            raise RecursionError
        if self._nodes > _MAX_NODES:
            raise ValueError(f"more than {_MAX_NODES} values")
        if isinstance(value, dict):
            return {_key(key): self.convert(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self.convert(item, depth + 1) for item in value]
        if value is None or isinstance(value, str | int | float | bool):
            return value
        raise ValueError(f"a {type(value).__name__} is not a configuration value")


def _key(key: object) -> str:
    if isinstance(key, str):
        return key
    raise ValueError(f"key {key!r} is not a string: quote it")


def _first_line(error: MarkedYAMLError) -> str:
    return str(error.problem or error).strip().splitlines()[0]


def _place(error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""


def _not_yaml(where: str, what: str, place: str) -> ConfigError:
    violation = f"{where}: {what}{place}"
    return ConfigError(
        f"{where} is not valid YAML 1.2: {what}{place}",
        remedy="mend the text at the named place; quote strings that hold ': ' or '#'",
        source=where,
        violations=(violation,),
    )
