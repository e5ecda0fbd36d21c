"""`resolve_model`: the model that a supernode's spec names, by preset or by a config file."""

from __future__ import annotations

import difflib
from pathlib import Path

from pydantic import ValidationError

from k3ray.config.model import ModelConfig
from k3ray.config.presets import PRESETS
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import ConfigError


def resolve_model(spec: SupernodeSpec) -> ModelConfig:
    """The model config of `spec`.

    Raises:
        ConfigError: unknown preset (the nearest known one is named), unreadable or invalid file.
    """
    if spec.model_config_file is not None:
        try:
            text = Path(spec.model_config_file).read_text(encoding="utf-8")
            return ModelConfig.model_validate_json(text)
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"model_config_file {spec.model_config_file}: {error}",
                remedy="give a config.json in the release's form",
            ) from error
    if spec.preset not in PRESETS:
        near = difflib.get_close_matches(spec.preset, PRESETS, n=1)
        raise ConfigError(
            f"preset {spec.preset!r} is unknown" + (f", did you mean {near[0]!r}?" if near else ""),
            remedy=f"use one of {', '.join(PRESETS)}",
            preset=spec.preset,
        )
    return PRESETS[spec.preset]
