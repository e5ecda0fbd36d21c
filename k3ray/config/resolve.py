"""What a supernode's spec means: `resolve_model` and `resolve_tokenizer`."""

from __future__ import annotations

import difflib
from pathlib import Path

from k3ray.config.model import ModelConfig
from k3ray.config.presets import PRESETS
from k3ray.config.release import read_release_config
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import ConfigError

TOKENIZER_FILES = ("tiktoken.model", "tokenizer.json")
"""What a checkpoint's tokenizer is called; the first that is there counts."""


def resolve_model(spec: SupernodeSpec) -> ModelConfig:
    """The model config of `spec`: that of its `checkpoint`, or of its `model_config_file`, where
    one is named, else its preset.

    Raises:
        ConfigError: unknown preset (the nearest known one is named), unreadable or invalid file.
    """
    if spec.checkpoint is not None:
        return read_release_config(str(Path(spec.checkpoint) / "config.json"))
    if spec.model_config_file is not None:
        return read_release_config(spec.model_config_file)
    return preset_config(spec.preset)


def resolve_tokenizer(spec: SupernodeSpec) -> str | None:
    """The tokenizer's file: the spec's, else the one that lies in its checkpoint, else None."""
    if spec.tokenizer_file is not None or spec.checkpoint is None:
        return spec.tokenizer_file
    beside = (Path(spec.checkpoint) / name for name in TOKENIZER_FILES)
    return next((str(file) for file in beside if file.is_file()), None)


def named_model(preset: str | None, config: str | None, *, default: str) -> ModelConfig:
    """The model of a preset or of a release's `config.json`, whichever is named.

    Raises:
        ConfigError: both are named, or as `preset_config` and `read_release_config`.
    """
    if config is None:
        return preset_config(default if preset is None else preset)
    if preset is not None:
        raise ConfigError("both --preset and --config are given", remedy="give one", violations=())
    return read_release_config(config)


def preset_config(name: str) -> ModelConfig:
    """The preset called `name`.

    Raises:
        ConfigError: no such preset; the nearest known one is named.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    raise ConfigError(
        f"preset {name!r} is unknown" + (f", did you mean {near[0]!r}?" if near else ""),
        remedy=f"use one of {', '.join(PRESETS)}",
        preset=name,
        violations=(f"preset: {name!r} is unknown",),
    )
