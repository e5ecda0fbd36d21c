"""A model's config as the release's `config.json` would say it: what other implementations read.

`read_release_config` of what is written here gives the same config back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3ray.config import release_facts as facts
from k3ray.config.model import LayerKind, ModelConfig, TextConfig

_QUANTIZATION: dict[str, Any] = {
    **facts.QUANTIZATION_FIXED,
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": True,
                "type": "float", "zp_dtype": None,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
}  # fmt: skip


def release_json(model: ModelConfig, *, packed_experts: bool) -> dict[str, Any]:
    """The document to write as `config.json`.

    Args:
        model: The model.
        packed_experts: Whether the routed experts are stored in MXFP4.
    """
    text = model.text_config
    text_document: dict[str, Any] = {
        **facts.TEXT_FIXED,
        **text.model_dump(mode="json"),
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "use_grouped_topk": True,
    }
    text_document["linear_attn_config"] |= {
        **facts.LINEAR_FIXED, "kda_layers": _kda_layers(text),
    }  # fmt: skip
    if packed_experts:
        text_document["quantization_config"] = _QUANTIZATION
    vision = model.vision_config
    return {
        **facts.TOP_FIXED,
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        **{key: getattr(text, key) for key in sorted(facts.TOP_SHARED)},
        "text_config": text_document,
        "vision_config": None if vision is None else vision.model_dump(mode="json"),
    }


def with_kept_keys(document: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """`document` with the keys of an earlier one that it lacks, in every section; but not its
    quantisation, which tells a format that may have changed."""
    merged = {k: v for k, v in kept.items() if k not in document and k != "quantization_config"}
    for key, value in document.items():
        before = kept.get(key)
        nested = key != "quantization_config" and isinstance(value, Mapping)
        if nested and isinstance(before, Mapping):
            merged[key] = with_kept_keys(value, before)
        else:
            merged[key] = value
    return merged


def _kda_layers(text: TextConfig) -> list[int]:
    """The KDA layers, 1-based as in the release."""
    return [i for i, kind in enumerate(text.layer_kinds, start=1) if kind is LayerKind.KDA]
