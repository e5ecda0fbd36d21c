"""`ModelConfig` from the release's own `config.json`, unchanged.

`read_release_config` refuses what we would compute wrongly: unknown keys, values that the model
code does not implement, a `kda_layers` list that is not the complement of `full_attn_layers`.
All violations are listed at once. The tables of keys are in `release_facts`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from k3ray.config import release_facts as facts
from k3ray.config.load import config_error, read_mapping
from k3ray.config.model import (
    MAX_LAYERS,
    LinearAttnConfig,
    ModelConfig,
    TextConfig,
    VisionConfig,
)
from k3ray.config.violations import describe

_MISSING = object()


def read_release_config(path: str) -> ModelConfig:
    """Read the `config.json` of a K3-shaped release.

    Raises:
        ConfigError: unreadable file, or violations (all of them in `fields["violations"]`).
    """
    return release_config(read_mapping(path), source=path)


def release_config(data: Mapping[str, Any], *, source: str) -> ModelConfig:
    """`read_release_config` on parsed JSON; `source` names it in errors."""
    text = _section(data, "text_config")
    linear = _section(text, "linear_attn_config")
    quantization = _section(text, "quantization_config")
    vision = _section(data, "vision_config")
    violations = [
        *_check_sections(data, text),
        *_check_keys(
            data, "", facts.TOP_FIXED,
            facts.TOP_SECTIONS | facts.TOP_SHARED | facts.TOP_INERT,
        ),
        *_check_keys(
            text, "text_config.", facts.TEXT_FIXED,
            TextConfig.model_fields.keys() | facts.TEXT_INERT | {"quantization_config"},
            if_given=facts.TEXT_FIXED_IF_GIVEN,
        ),
        *_check_keys(
            linear, "text_config.linear_attn_config.", facts.LINEAR_FIXED,
            LinearAttnConfig.model_fields.keys() | {"kda_layers"},
        ),
        *_check_keys(
            quantization, "text_config.quantization_config.",
            facts.QUANTIZATION_FIXED if quantization else {},
            facts.QUANTIZATION_INERT,
        ),
        *_check_keys(
            vision, "vision_config.", facts.VISION_FIXED if vision else {},
            VisionConfig.model_fields.keys() | facts.VISION_INERT,
        ),
        *_check_shared_ids(data, text),
        *_check_kda_layers(text, linear),
    ]  # fmt: skip
    kept = {key: text[key] for key in TextConfig.model_fields if key in text}
    if isinstance(text.get("linear_attn_config"), Mapping):
        kept["linear_attn_config"] = {
            key: linear[key] for key in LinearAttnConfig.model_fields if key in linear
        }
    ours: dict[str, Any] = {"model_type": "kimi_k3", "text_config": kept}
    if vision:
        ours["vision_config"] = {k: vision[k] for k in VisionConfig.model_fields if k in vision}
    try:
        config = ModelConfig.model_validate_json(json.dumps(ours))
    except ValidationError as error:
        violations += describe(ModelConfig, error)
    if violations:
        raise config_error(ModelConfig, source, violations)
    return config


def _section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _check_sections(data: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """A section that is there must be a mapping (or null), or it would count as left out."""
    for place, holder, key in (
        ("", data, "vision_config"), ("text_config.", text, "quantization_config"),
    ):  # fmt: skip
        if holder.get(key) is not None and not isinstance(holder[key], Mapping):
            yield f"{place}{key}: must be a mapping or null"


def _check_keys(
    data: Mapping[str, Any],
    prefix: str,
    fixed: Mapping[str, Any],
    others: frozenset[str] | set[str],
    *,
    if_given: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    known = {*fixed, *others, *(if_given or {})}
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7)
            yield f"{prefix}{key}: unknown key" + (f" (did you mean {near[0]!r}?)" if near else "")
    for key, wanted in fixed.items():
        given = data.get(key, _MISSING)
        if given is _MISSING:
            yield f"{prefix}{key}: required (only {wanted!r} is supported), but not given"
        elif not _same(given, wanted):
            yield f"{prefix}{key}: {given!r} is not supported, only {wanted!r} is"
    for key, wanted in (if_given or {}).items():
        if key in data and not _same(data[key], wanted):
            yield f"{prefix}{key}: {data[key]!r} is not supported, only {wanted!r} is"


def _same(given: object, wanted: object) -> bool:
    return type(given) is type(wanted) and given == wanted


def _check_shared_ids(data: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(facts.TOP_SHARED & data.keys() & text.keys()):
        if data[key] != text[key]:
            yield f"{key}: {data[key]!r} differs from text_config.{key} {text[key]!r}"


def _check_kda_layers(text: Mapping[str, Any], linear: Mapping[str, Any]) -> Iterator[str]:
    kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
    count = text.get("num_hidden_layers")
    if not (isinstance(kda, list) and isinstance(full, list) and isinstance(count, int)):
        return  # a missing full_attn_layers is reported as such; kda_layers may be left out
    listed = [*kda, *full]
    if not all(type(layer) is int for layer in listed):
        yield "text_config.linear_attn_config.kda_layers: must hold whole numbers"
        return
    if max(count, len(listed)) > MAX_LAYERS:
        return  # refused for its number of layers
    wrong = sorted({*range(1, count + 1)} ^ {*listed}, key=str)
    twice = sorted({layer for layer in listed if listed.count(layer) > 1}, key=str)
    if wrong or twice:
        yield (
            "text_config.linear_attn_config.kda_layers: must be the complement of "
            f"full_attn_layers in 1..{count}; in neither or out of range: {wrong}, twice: {twice}"
        )
