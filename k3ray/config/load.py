"""Reading configurations: YAML 1.2 plus dotted `key=value` overrides, checked strictly at once.

Everything goes through pydantic's JSON mode, where strict types still accept what JSON can say
(lists for tuples, strings for enums). All violations come in one `ConfigError`, each with its
dotted path and, for an unknown key, the nearest known one.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from k3ray.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)


def load_config(
    cls: type[Config],
    path: str | None,
    overrides: Sequence[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
) -> Config:
    """A `cls` from `base`, then the YAML file at `path`, then the overrides.

    Args:
        cls: The config class.
        path: YAML 1.2 file, or None for the defaults.
        overrides: `dotted.key=value`; the value is a YAML 1.2 scalar or flow.
        base: Values under the file's.

    Raises:
        ConfigError: the file cannot be read, or any key or value is wrong (all are listed).
    """
    values: dict[str, Any] = dict(base or {})
    if path is not None:
        values = _merged(values, _read_yaml_file(path))
    for override in overrides:
        _apply(values, override)
    return validate(cls, values)


def validate(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """A `cls` from plain values; raises `ConfigError` with every violation."""
    try:
        return cls.model_validate_json(json.dumps(values))
    except ValidationError as error:
        violations = [_violation(cls, dict(item)) for item in error.errors()]
        raise ConfigError(
            f"{cls.__name__} has {len(violations)} violation(s):\n  " + "\n  ".join(violations),
            remedy="mend them all; `k3ray config show` prints a valid one",
            violations=violations,
        ) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{cls.__name__}: a value has no JSON form: {error}",
            remedy="use strings, numbers, booleans, lists and mappings only",
            violations=[str(error)],
        ) from error


def to_yaml(model: BaseModel) -> str:
    """The resolved config as YAML, keys in declaration order."""
    yaml, sink = YAML(), io.StringIO()
    yaml.default_flow_style = None
    yaml.width = 100
    yaml.dump(model.model_dump(mode="json"), sink)
    return sink.getvalue()


def config_digest(model: BaseModel) -> str:
    """SHA-256 (hex) of the canonical JSON of a config."""
    canonical = json.dumps(model.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _read_yaml_file(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read config {path}: {error}", remedy="give a readable UTF-8 YAML file",
            violations=[str(error)],
        ) from error  # fmt: skip
    parsed = _parse_yaml(text, where=path)
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ConfigError(
            f"{path} holds a {type(parsed).__name__}, not a mapping",
            remedy="write `key: value` lines", violations=[path],
        )  # fmt: skip
    return parsed


def _parse_yaml(text: str, *, where: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(
            f"{where} is not YAML: {error}", remedy="mend the line it names",
            violations=[str(error)],
        ) from error  # fmt: skip


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `under`, mappings merged key by key."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = _merged(below, value)
        else:
            result[key] = value
    return result


def _apply(values: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted or not all(dotted.split(".")):
        raise ConfigError(
            f"override {override!r} is not of the form dotted.key=value",
            remedy="for example optimizer.peak_lr=1e-3", violations=[override],
        )  # fmt: skip
    *parents, last = dotted.split(".")
    target = values
    for parent in parents:
        child = target.get(parent)
        child = dict(child) if isinstance(child, Mapping) else {}
        target[parent] = child
        target = child
    target[last] = _parse_yaml(text, where=f"override {override!r}") if text else ""


def _violation(cls: type[BaseModel], item: dict[str, Any]) -> str:
    location = [str(part) for part in item["loc"]]
    dotted = ".".join(location) or "(whole)"
    if item["type"] != "extra_forbidden":
        return f"{dotted}: {item['msg']}"
    known = _known_keys(cls, location[:-1])
    near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.4)
    hint = f", did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(known))}"
    return f"{dotted}: unknown key{hint}"


def _known_keys(cls: type[BaseModel], location: Sequence[str]) -> list[str]:
    """Keys that are allowed at `location` below `cls`."""
    current: type[BaseModel] = cls
    for part in location:
        field = current.model_fields.get(part)
        nested = _model_in(field.annotation) if field else None
        if nested is None:
            return list(current.model_fields)
        current = nested
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
