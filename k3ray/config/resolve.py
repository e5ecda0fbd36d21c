"""`resolve_model`: the model that a supernode's spec names, by preset or by a config file."""

from __future__ import annotations

import difflib
from pathlib import Path

from k3ray.config.model import ModelConfig
from k3ray.config.presets import PRESETS
from k3ray.config.release import read_release_config
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import ConfigError


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
