"""Our tensor map against the release's own index, and the config that goes with a checkpoint."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest

from k3ray.config.count import count_parameters
from k3ray.config.presets import PRESETS
from k3ray.config.release import release_config
from k3ray.config.release_writer import release_json
from k3ray.errors import ConfigError
from k3ray.weights.release_layout import (
    TEXT_PREFIX,
    ExpertFormat,
    count_vision,
    release_shards,
    total_bytes,
)

DATA = Path(__file__).parents[2] / "support" / "data"


def test_all_names_shards_and_bytes_of_the_release() -> None:
    index = json.loads(lzma.decompress((DATA / "kimi_k3_index.json.xz").read_bytes()))
    shards = release_shards(PRESETS["kimi-k3"], ExpertFormat.MXFP4)
    ours = {spec.name: shard.file for shard in shards for spec in shard.tensors}
    assert len(ours) == 497_220
    assert ours == index["weight_map"]
    # The byte sum is equal only with the release's dtypes and shapes: see architecture.md 1.4.
    size = sum(spec.size_bytes for shard in shards for spec in shard.tensors)
    assert size == total_bytes(PRESETS["kimi-k3"], ExpertFormat.MXFP4)
    assert size == index["metadata"]["total_size"] == 1_560_860_324_864


def test_vision_parameters() -> None:
    vision = PRESETS["kimi-k3"].vision_config
    assert vision is not None
    assert count_vision(vision) == (401_214_464, 46_144_512)


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"kimi-k3"}))
@pytest.mark.parametrize("experts", [ExpertFormat.FP32, ExpertFormat.BF16])
def test_shapes_add_up_to_the_parameter_count(preset: str, experts: ExpertFormat) -> None:
    model = PRESETS[preset]
    specs = [spec for shard in release_shards(model, experts) for spec in shard.tensors]
    count = sum(math.prod(spec.shape) for spec in specs if spec.name.startswith(TEXT_PREFIX))
    kda = len(model.text_config.linear_attn_config.full_attn_layers)
    padding = (model.text_config.num_hidden_layers - kda) * (
        128 - model.text_config.linear_attn_config.num_heads
    )
    assert count - padding == count_parameters(model.text_config).total
    assert len(specs) == len({spec.name for spec in specs})


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("packed", [True, False])
def test_the_written_config_reads_back(preset: str, packed: bool) -> None:
    document = json.loads(json.dumps(release_json(PRESETS[preset], packed_experts=packed)))
    assert release_config(document, source="test") == PRESETS[preset]
    assert ("quantization_config" in document["text_config"]) == packed


def test_the_written_config_says_what_the_release_says() -> None:
    release = json.loads((DATA / "kimi_k3_config.json").read_text(encoding="utf-8"))
    ours = json.loads(json.dumps(release_json(PRESETS["kimi-k3"], packed_experts=True)))
    for section, theirs in ((ours, release), (ours["text_config"], release["text_config"])):
        shared = section.keys() - {"text_config", "vision_config", "linear_attn_config"}
        assert {k: section[k] for k in shared} == {k: theirs[k] for k in shared}
    vision = release["vision_config"]
    assert ours["vision_config"] == {k: vision[k] for k in vision if not k.startswith("_")}
    linear = ours["text_config"]["linear_attn_config"]
    assert linear == release["text_config"]["linear_attn_config"]


def test_vision_of_another_width_is_refused() -> None:
    document = release_json(PRESETS["kimi-k3"], packed_experts=True)
    document["vision_config"]["text_hidden_size"] = 64
    with pytest.raises(ConfigError, match="text_hidden_size"):
        release_config(document, source="test")
    document["vision_config"] |= {"text_hidden_size": 7168, "norm_type": "layernorm"}
    with pytest.raises(ConfigError, match="norm_type"):
        release_config(document, source="test")
