"""`ModelConfig`: a K3-shaped model, with the release's own field names.

The release nests a text config and a vision config in one `config.json`; so do we. What follows
from other fields (the kind of every layer, which layers hold experts) is a property, never a
field. Source: the release's config.json and `architecture.md` section 1.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from k3ray.config.base import Strict

MAX_SIZE, MAX_LAYERS, MAX_EXPERTS = 1 << 30, 4096, 1 << 16
"""Beyond any model; keep a hostile config from costing memory before it is refused."""


class LayerKind(StrEnum):
    """Attention kind of a decoder layer."""

    KDA = "kda"
    MLA = "mla"


class LinearAttnConfig(Strict):
    """Kimi Delta Attention sizes; `full_attn_layers` holds the 1-based MLA layers."""

    num_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    short_conv_kernel_size: int = Field(default=4, gt=1)
    use_full_rank_gate: bool = True
    gate_lower_bound: float = Field(default=-5.0, lt=0.0)
    full_attn_layers: tuple[int, ...]


class TextConfig(Strict):
    """The language model (`text_config` of the release)."""

    vocab_size: int = Field(gt=256, le=MAX_SIZE)
    hidden_size: int = Field(gt=0, le=MAX_SIZE)
    intermediate_size: int = Field(gt=0, le=MAX_SIZE)
    num_hidden_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_attention_heads: int = Field(gt=0, le=MAX_SIZE)
    num_key_value_heads: int = Field(gt=0, le=MAX_SIZE)
    max_position_embeddings: int = Field(gt=0, le=MAX_SIZE)
    q_lora_rank: int = Field(gt=0, le=MAX_SIZE)
    kv_lora_rank: int = Field(gt=0, le=MAX_SIZE)
    qk_nope_head_dim: int = Field(gt=0, le=MAX_SIZE)
    qk_rope_head_dim: int = Field(gt=0, le=MAX_SIZE)
    v_head_dim: int = Field(gt=0, le=MAX_SIZE)
    num_experts: int = Field(gt=0, le=MAX_EXPERTS)
    num_experts_per_token: int = Field(gt=0, le=MAX_SIZE)
    num_shared_experts: int = Field(gt=0, le=MAX_SIZE)
    moe_intermediate_size: int = Field(gt=0, le=MAX_SIZE)
    routed_expert_hidden_size: int = Field(gt=0, le=MAX_SIZE)
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    first_k_dense_replace: int = Field(default=1, ge=0, le=MAX_SIZE)
    moe_layer_freq: int = Field(default=1, ge=1, le=MAX_SIZE)
    activation_situ_beta: float = Field(default=4.0, gt=0)
    activation_situ_linear_beta: float | None = Field(default=25.0, gt=0)
    attn_res_block_size: int = Field(gt=0, le=MAX_SIZE)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    bos_token_id: int = Field(ge=0, le=MAX_SIZE)
    eos_token_id: int = Field(ge=0, le=MAX_SIZE)
    pad_token_id: int = Field(ge=0, le=MAX_SIZE)
    linear_attn_config: LinearAttnConfig

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems: list[str] = []
        if self.num_experts_per_token > self.num_experts:
            problems.append(
                f"num_experts_per_token ({self.num_experts_per_token}) exceeds num_experts "
                f"({self.num_experts}): lower the first or raise the second"
            )
        full = self.linear_attn_config.full_attn_layers
        if any(not 1 <= layer <= self.num_hidden_layers for layer in full):
            problems.append(
                f"linear_attn_config.full_attn_layers {full} must be 1-based layers within "
                f"num_hidden_layers ({self.num_hidden_layers})"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) >= self.vocab_size:
                problems.append(
                    f"{name} ({getattr(self, name)}) must be below vocab_size ({self.vocab_size})"
                )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Attention kind of each layer, index 0-based."""
        full = frozenset(self.linear_attn_config.full_attn_layers)
        return tuple(
            LayerKind.MLA if index + 1 in full else LayerKind.KDA
            for index in range(self.num_hidden_layers)
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based layers whose feed-forward is a LatentMoE (the others are dense)."""
        return tuple(
            index
            for index in range(self.num_hidden_layers)
            if index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0
        )

    @property
    def special_token_base(self) -> int:
        """First id of the 256 special-token slots at the end of the vocabulary."""
        return self.vocab_size - 256


class VisionConfig(Strict):
    """The vision tower and projector (`vision_config` of the release), in its own field names.

    Not computed yet: it names and sizes tensors that are copied byte for byte. The defaults are
    the release's.
    """

    patch_size: int = Field(default=14, gt=0, le=MAX_SIZE)
    init_pos_emb_height: int = Field(default=64, gt=0, le=MAX_SIZE)
    init_pos_emb_width: int = Field(default=64, gt=0, le=MAX_SIZE)
    init_pos_emb_time: int = Field(default=4, gt=0, le=MAX_SIZE)
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"
    vt_hidden_size: int = Field(default=1024, gt=0, le=MAX_SIZE)
    vt_num_hidden_layers: int = Field(default=27, gt=0, le=MAX_LAYERS)
    vt_num_attention_heads: int = Field(default=12, gt=0, le=MAX_SIZE)
    qkv_hidden_size: int = Field(default=1536, gt=0, le=MAX_SIZE)
    vt_intermediate_size: int = Field(default=4096, gt=0, le=MAX_SIZE)
    norm_type: str = "rmsnorm"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    merge_kernel_size: tuple[int, int] = (2, 2)
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    mm_hidden_size: int = Field(default=1024, gt=0, le=MAX_SIZE)
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = Field(default=1e-5, gt=0)
    text_hidden_size: int = Field(default=7168, gt=0, le=MAX_SIZE)


class ModelConfig(Strict):
    """A whole K3-shaped model; `vision_config` None is a model without images."""

    model_type: str = "kimi_k3"
    text_config: TextConfig
    vision_config: VisionConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        vision, width = self.vision_config, self.text_config.hidden_size
        if vision is not None and vision.text_hidden_size != width:
            raise ValueError(
                f"vision_config.text_hidden_size ({vision.text_hidden_size}) must be "
                f"text_config.hidden_size ({width})"
            )
        return self
