"""Reading configs: defaults < base < YAML file < dotted overrides, validated strictly.

`load_config` reports every violation at once, each with its dotted path, in one `ConfigError`;
unknown keys come with the nearest known one. A nested section given in part keeps the defaults of
*its place* (`lanes.serve.credit_bytes=1` keeps `lanes.serve.min_share` at 0.3, not at
LaneConfig's own default). `to_yaml` and `config_digest` are the resolved forms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from k3ray.config.violations import describe
from k3ray.config.yaml_text import dump_yaml, parse_scalar, parse_yaml
from k3ray.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


def load_config(
    cls: type[T],
    path: str | None,
    overrides: Sequence[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
) -> T:
    """Resolve a config object.

    Args:
        cls: The config class.
        path: A YAML 1.2 file holding a mapping, or None.
        overrides: `a.b=value` texts; the value is a YAML scalar or flow collection. Later ones
            win.
        base: JSON values under the file, such as a preset.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or the result violates `cls`;
            `fields["violations"]` lists all of them.
    """
    source = Path(path).name if path is not None else "defaults"
    data = dict(base or {})
    if path is not None:
        data = _merged(data, read_mapping(path))
    violations: list[str] = []
    for text in overrides:
        problem = _apply_override(cls, data, text)
        if problem is not None:
            violations.append(problem)
    try:
        config = cls.model_validate_json(json.dumps(_with_defaults(cls, data, None)))
    except ValidationError as error:
        violations += describe(cls, error)
    if violations:
        raise config_error(cls, source, violations)
    return config


def read_mapping(path: str) -> dict[str, Any]:
    """Read a YAML (or JSON, which is YAML 1.2) file that holds a mapping; empty means {}.

    Raises:
        ConfigError: unreadable, not UTF-8, not YAML, or not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"cannot read config file {path}: {reason}",
            remedy="check the path and its permissions",
            source=path,
            violations=(f"{path}: {reason}",),
        ) from error
    value = parse_yaml(text, where=path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ConfigError(
            f"config file {path} holds a {kind}, not a mapping",
            remedy="write `key: value` lines",
            source=path,
            violations=(f"{path}: {kind} instead of a mapping",),
        )
    return value


def to_yaml(model: BaseModel) -> str:
    """The resolved config as YAML; `load_config` reads it back equal."""
    return dump_yaml(model.model_dump(mode="json"))


def canonical_json(model: BaseModel) -> str:
    """The resolved config as one line of JSON with sorted keys."""
    data = model.model_dump(mode="json")
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_digest(model: BaseModel) -> str:
    """sha256 (hex) of the canonical JSON: equal configs have equal digests everywhere."""
    return hashlib.sha256(canonical_json(model).encode()).hexdigest()


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            out[key] = _merged(below, value)
        else:
            out[key] = value
    return out


def _apply_override(cls: type[BaseModel], data: dict[str, Any], text: str) -> str | None:
    """Set `a.b=value` in `data`; returns the violation instead if the text is malformed."""
    key, separator, raw = text.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        return f"override {text!r}: not of the form key=value or section.key=value"
    try:
        value = parse_scalar(raw, where=f"override {key.strip()}")
    except ConfigError as error:
        return "; ".join(error.fields["violations"])
    node = data
    for depth, part in enumerate(parts[:-1], start=1):
        below = node.get(part)
        if below is None:
            below = _default_mapping(cls, parts[:depth])
        if not isinstance(below, Mapping):
            return f"{key.strip()}: {'.'.join(parts[:depth])} is {below!r}, not a section"
        node[part] = dict(below)
        node = node[part]
    node[parts[-1]] = value
    return None


def _default_mapping(cls: type[BaseModel], parts: Sequence[str]) -> dict[str, Any]:
    """The default of the free-form mapping at `parts` (dotted overrides add to it), else {}."""
    here: Any = cls
    for part in parts:
        is_model = isinstance(here, type) and issubclass(here, BaseModel)
        field = here.model_fields.get(part) if is_model else None
        if field is None:
            return {}
        here = section_class(field.annotation) or field.get_default(call_default_factory=True)
    return dict(here) if isinstance(here, Mapping) else {}


def section_class(annotation: object) -> type[BaseModel] | None:
    """The config class of a section field (`X` or `X | None`), None for anything else."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    args = [arg for arg in get_args(annotation) if arg is not type(None)]
    only = args[0] if len(args) == 1 and type(None) in get_args(annotation) else None
    return only if isinstance(only, type) and issubclass(only, BaseModel) else None


def _with_defaults(
    cls: type[BaseModel], data: Mapping[str, Any], default: BaseModel | None
) -> dict[str, Any]:
    """Complete sections given in part from the defaults of their place."""
    out = dict(data)
    dumped = default.model_dump(mode="json") if default is not None else {}
    for name, field in cls.model_fields.items():
        if name not in data:
            if default is not None:
                out[name] = dumped[name]
            continue
        section = section_class(field.annotation)
        if section is None or not isinstance(data[name], Mapping):
            continue
        inherited = getattr(default, name) if default is not None else _own_default(field)
        out[name] = _with_defaults(
            section, data[name], inherited if isinstance(inherited, section) else None
        )
    return out


def _own_default(field: Any) -> object:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def config_error(cls: type[BaseModel], source: str, violations: Sequence[str]) -> ConfigError:
    """The one error that lists all violations of `cls` found in `source`."""
    count = f"{len(violations)} violation" + ("s" if len(violations) > 1 else "")
    return ConfigError(
        f"{cls.__name__} ({source}) has {count}: " + "; ".join(violations),
        remedy="mend all of them; `k3ray config show` prints the known keys and their values",
        source=source,
        violations=tuple(violations),
    )
