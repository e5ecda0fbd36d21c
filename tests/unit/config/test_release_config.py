"""The release's own config.json, unchanged, gives the kimi-k3 preset; other values are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from k3ray.config.count import count_parameters, kda_layer, mla_layer, moe_trunk
from k3ray.config.model import LayerKind
from k3ray.config.presets import PRESETS
from k3ray.config.release import read_release_config, release_config
from k3ray.config.resolve import resolve_model
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import ConfigError

RELEASE = Path(__file__).parents[2] / "support" / "data" / "kimi_k3_config.json"


@pytest.fixture
def data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RELEASE.read_text(encoding="utf-8"))
    return copy.deepcopy(loaded)


def _violations(data: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        release_config(data, source="config.json")
    found: tuple[str, ...] = caught.value.fields["violations"]
    return found


def test_release_file_is_the_preset() -> None:
    assert read_release_config(str(RELEASE)) == PRESETS["kimi-k3"]
    spec = SupernodeSpec(model_config_file=str(RELEASE))
    assert resolve_model(spec) == resolve_model(SupernodeSpec(preset="kimi-k3"))


def test_layer_kinds_of_the_release() -> None:
    text = PRESETS["kimi-k3"].text_config
    mla = [i for i, kind in enumerate(text.layer_kinds) if kind is LayerKind.MLA]
    assert mla == [*range(3, 92, 4), 92]
    assert text.moe_layers == tuple(range(1, 93))
    assert text.special_token_base == 163584


def test_parameter_counts_of_the_release() -> None:
    text = PRESETS["kimi-k3"].text_config
    count = count_parameters(text)
    assert (count.total, count.active) == (2_779_484_476_000, 104_189_612_640)
    assert (count.per_expert, count.routed_experts) == (33_030_144, 2_722_740_830_208)
    assert (kda_layer(text), mla_layer(text)) == (443_740_384, 232_196_096)
    assert moe_trunk(text) == 189_927_808
    assert count.dense + count.routed_experts == count.total


@pytest.mark.parametrize(
    ("preset", "millions"), [("k3-mini", (90, 130)), ("k3-bench28", (27.5, 28.5))]
)
def test_preset_sizes(preset: str, millions: tuple[float, float]) -> None:
    total = count_parameters(PRESETS[preset].text_config).total
    assert millions[0] * 1e6 <= total <= millions[1] * 1e6


def test_nano_is_a_few_million_active() -> None:
    assert 2e6 <= count_parameters(PRESETS["k3-nano"].text_config).active <= 6e6


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_keep_the_shape(preset: str) -> None:
    text = PRESETS[preset].text_config
    kinds = text.layer_kinds
    assert kinds[:4] == (LayerKind.KDA,) * 3 + (LayerKind.MLA,)
    assert kinds[-1] is LayerKind.MLA
    assert text.num_shared_experts == 2
    assert text.moe_layers == tuple(range(1, text.num_hidden_layers))
    assert text.num_hidden_layers > text.attn_res_block_size


def test_boilerplate_may_differ_or_be_absent(data: dict[str, Any]) -> None:
    data["text_config"]["temperature"] = 0.3
    del data["text_config"]["num_beams"], data["auto_map"]
    assert release_config(data, source="x") == PRESETS["kimi-k3"]


def test_all_refusals_at_once(data: dict[str, Any]) -> None:
    text = data["text_config"]
    data["surprise"] = 1
    data["eos_token_id"] = 3
    text["hidden_act"] = "silu"
    text["num_expert_group"] = True
    text["hiden_size"] = 1
    text["is_decoder"] = True
    del text["mla_use_nope"], text["vocab_size"]
    text["linear_attn_config"]["use_full_rank_gate"] = False
    text["linear_attn_config"]["kda_layers"][0] = 4
    text["quantization_config"]["quant_method"] = "gptq"
    data["vision_config"]["depth"] = 3
    violations = _violations(data)
    for expected in (
        "surprise: unknown key",
        "eos_token_id: 3 differs from text_config.eos_token_id 163586",
        "text_config.hidden_act: 'silu' is not supported, only 'situ' is",
        "text_config.num_expert_group: True is not supported, only 1 is",
        "text_config.hiden_size: unknown key (did you mean 'hidden_size'?)",
        "text_config.is_decoder: True is not supported, only False is",
        "text_config.mla_use_nope: required (only True is supported), but not given",
        "text_config.vocab_size: required, but not given",
        "text_config.linear_attn_config.use_full_rank_gate: False is not supported, only True is",
        "text_config.quantization_config.quant_method: 'gptq' is not supported, "
        "only 'compressed-tensors' is",
        "vision_config.depth: unknown key",
    ):
        assert expected in violations
    assert any("in neither or out of range: [1], twice: [4]" in text for text in violations)


def test_sections_of_a_wrong_type(data: dict[str, Any]) -> None:
    data["text_config"]["linear_attn_config"] = None
    assert any("linear_attn_config" in text for text in _violations(data))
    assert any("text_config" in text for text in _violations({"text_config": 3}))


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'k3-nano'"):
        resolve_model(SupernodeSpec(preset="k3-nanno"))
