"""Which tensors a checkpoint in the release's layout holds: names, dtypes, shapes, shards.

Everything follows from the config: decoder layer L lies in shard L + 1, embedding, head and last
norms in the one after, then projector and vision tower if there are any. Dense text weights are
BF16 but for six float32 names; routed experts are MXFP4, BF16 or F32. For the release this gives
its 497,220 names in its 96 shards and its byte count. No torch here.
Source: architecture.md sections 1.4 and 11.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from k3ray.config.model import LayerKind, ModelConfig, TextConfig, VisionConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.errors import ConfigError
from k3ray.weights.names import EXPERT_MATRICES

TEXT_PREFIX = "language_model."
"""What the release puts before the names that the model itself uses."""

MX_BLOCK = 32
"""Elements that share one MXFP4 scale, along the input dim."""

A_LOG_SLOTS = 128
"""The release pads A_log to this many heads with zeros."""


DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
"""The safetensors dtypes in use, and their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a checkpoint; `dtype` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """One file of a checkpoint, its tensors in order of their names."""

    file: str
    tensors: tuple[TensorSpec, ...]


def release_shards(model: ModelConfig, experts: ExpertFormat) -> tuple[ShardSpec, ...]:
    """All shards of a checkpoint, in order.

    Raises:
        ConfigError: MXFP4 is asked for and a side of the experts is no multiple of 32.
    """
    check_format(model.text_config, experts)
    text, vision = model.text_config, model.vision_config
    groups = [
        [*_layer(text, layer), *_experts(text, layer, experts)]
        for layer in range(text.num_hidden_layers)
    ]
    groups.append(list(_ends(text)))
    if vision is not None:
        groups += [list(_projector(vision)), list(_vision_tower(vision))]
    return tuple(
        ShardSpec(
            file=f"model-{number:05d}-of-{len(groups):06d}.safetensors",
            tensors=tuple(sorted(tensors, key=lambda spec: spec.name)),
        )
        for number, tensors in enumerate(groups, start=1)
    )


def check_format(text: TextConfig, experts: ExpertFormat) -> None:
    """Raise `ConfigError` when the experts' sizes do not allow the format."""
    sizes = {
        "moe_intermediate_size": text.moe_intermediate_size,
        "routed_expert_hidden_size": text.routed_expert_hidden_size,
    }
    odd = {name: size for name, size in sizes.items() if size % MX_BLOCK}
    if experts is ExpertFormat.MXFP4 and odd:
        raise ConfigError(
            f"MXFP4 has blocks of {MX_BLOCK}, but {odd}",
            remedy="store the experts in bf16 or fp32, or choose multiples of 32",
            violations=tuple(f"{name}: {size} is no multiple of 32" for name, size in odd.items()),
        )


def total_bytes(model: ModelConfig, experts: ExpertFormat) -> int:
    """Bytes of all tensors of a checkpoint: the index's `total_size`.

    >>> from k3ray.config.presets import PRESETS
    >>> total_bytes(PRESETS["kimi-k3"], ExpertFormat.MXFP4)
    1560860324864
    """
    text, vision = model.text_config, model.vision_config
    specs = [*_ends(text)]
    for layer in range(text.num_hidden_layers):
        specs += _layer(text, layer)
    if vision is not None:
        specs += [*_projector(vision), *_vision_tower(vision)]
    routed = len(text.moe_layers) * text.num_experts * expert_bytes(text, experts)
    return sum(spec.size_bytes for spec in specs) + routed


def num_routed(text: TextConfig) -> int:
    """Matrices of all routed experts: fewer tensors than that cannot be a whole checkpoint."""
    return len(text.moe_layers) * text.num_experts * len(EXPERT_MATRICES)


def expert_bytes(text: TextConfig, experts: ExpertFormat) -> int:
    """Bytes of one routed expert."""
    return sum(spec.size_bytes for spec in _expert(text, "", experts))


def count_vision(vision: VisionConfig) -> tuple[int, int]:
    """Parameters of (vision tower, projector).

    >>> count_vision(VisionConfig())
    (401214464, 46144512)
    """
    tower, projector = (
        sum(math.prod(spec.shape) for spec in specs)
        for specs in (_vision_tower(vision), _projector(vision))
    )
    return tower, projector


def _text(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name=TEXT_PREFIX + name, dtype=dtype, shape=shape)


def _ends(cfg: TextConfig) -> Iterator[TensorSpec]:
    hidden = cfg.hidden_size
    yield _text("model.embed_tokens.weight", cfg.vocab_size, hidden)
    yield _text("lm_head.weight", cfg.vocab_size, hidden)
    yield _text("model.norm.weight", hidden)
    yield _text("model.output_attn_res_norm.weight", hidden)
    yield _text("model.output_attn_res_proj.weight", 1, hidden)


def _layer(cfg: TextConfig, layer: int) -> Iterator[TensorSpec]:
    """All of a decoder layer but its routed experts."""
    prefix, hidden = f"model.layers.{layer}.", cfg.hidden_size
    for norm in (
        "input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm",
    ):  # fmt: skip
        yield _text(f"{prefix}{norm}.weight", hidden)
    for proj in ("self_attention_res_proj", "mlp_res_proj"):
        yield _text(f"{prefix}{proj}.weight", 1, hidden)
    attention = _kda if cfg.layer_kinds[layer] is LayerKind.KDA else _mla
    yield from attention(cfg, f"{prefix}self_attn.")
    if layer in cfg.moe_layers:
        yield from _moe(cfg, f"{prefix}block_sparse_moe.")
    else:
        yield from _mlp(f"{prefix}mlp.", hidden, cfg.intermediate_size)


def _kda(cfg: TextConfig, prefix: str) -> Iterator[TensorSpec]:
    linear, hidden = cfg.linear_attn_config, cfg.hidden_size
    heads, head_dim = linear.num_heads, linear.head_dim
    width = heads * head_dim
    for proj in ("q_proj", "k_proj", "v_proj", "g_proj"):
        yield _text(f"{prefix}{proj}.weight", width, hidden)
    yield _text(f"{prefix}o_proj.weight", hidden, width)
    for conv in ("q_conv1d", "k_conv1d", "v_conv1d"):
        shape = (width, 1, linear.short_conv_kernel_size)
        yield _text(f"{prefix}{conv}.weight", *shape, dtype="F32")
    yield _text(f"{prefix}f_a_proj.weight", head_dim, hidden)
    yield _text(f"{prefix}f_b_proj.weight", width, head_dim)
    yield _text(f"{prefix}b_proj.weight", heads, hidden)
    yield _text(f"{prefix}A_log", max(heads, A_LOG_SLOTS), dtype="F32")
    yield _text(f"{prefix}dt_bias", width, dtype="F32")
    yield _text(f"{prefix}o_norm.weight", head_dim, dtype="F32")


def _mla(cfg: TextConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads = cfg.hidden_size, cfg.num_attention_heads
    nope, rope, value = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    query, latent = cfg.q_lora_rank, cfg.kv_lora_rank
    yield _text(f"{prefix}q_a_proj.weight", query, hidden)
    yield _text(f"{prefix}q_a_layernorm.weight", query)
    yield _text(f"{prefix}q_b_proj.weight", heads * (nope + rope), query)
    yield _text(f"{prefix}kv_a_proj_with_mqa.weight", latent + rope, hidden)
    yield _text(f"{prefix}kv_a_layernorm.weight", latent)
    yield _text(f"{prefix}kv_b_proj.weight", heads * (nope + value), latent)
    yield _text(f"{prefix}g_proj.weight", heads * value, hidden)
    yield _text(f"{prefix}o_proj.weight", hidden, heads * value)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[TensorSpec]:
    yield _text(f"{prefix}gate_proj.weight", inner, hidden)
    yield _text(f"{prefix}up_proj.weight", inner, hidden)
    yield _text(f"{prefix}down_proj.weight", hidden, inner)


def _moe(cfg: TextConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, latent = cfg.hidden_size, cfg.routed_expert_hidden_size
    inner = cfg.moe_intermediate_size
    yield _text(f"{prefix}gate.weight", cfg.num_experts, hidden)
    yield _text(f"{prefix}gate.e_score_correction_bias", cfg.num_experts, dtype="F32")
    yield _text(f"{prefix}routed_expert_down_proj.weight", latent, hidden)
    yield _text(f"{prefix}routed_expert_up_proj.weight", hidden, latent)
    yield _text(f"{prefix}routed_expert_norm.weight", latent)
    yield from _mlp(f"{prefix}shared_experts.", hidden, cfg.num_shared_experts * inner)


def _experts(cfg: TextConfig, layer: int, experts: ExpertFormat) -> Iterator[TensorSpec]:
    if layer in cfg.moe_layers:
        for expert in range(cfg.num_experts):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            yield from _expert(cfg, prefix, experts)


def _expert(cfg: TextConfig, prefix: str, experts: ExpertFormat) -> Iterator[TensorSpec]:
    inner, latent = cfg.moe_intermediate_size, cfg.routed_expert_hidden_size
    for matrix in EXPERT_MATRICES:
        rows, cols = (latent, inner) if matrix == "w2" else (inner, latent)
        if experts is ExpertFormat.MXFP4:
            yield _text(f"{prefix}{matrix}.weight_packed", rows, cols // 2, dtype="U8")
            yield _text(f"{prefix}{matrix}.weight_scale", rows, cols // MX_BLOCK, dtype="U8")
        else:
            dtype = "F32" if experts is ExpertFormat.FP32 else "BF16"
            yield _text(f"{prefix}{matrix}.weight", rows, cols, dtype=dtype)


def _projector(vision: VisionConfig) -> Iterator[TensorSpec]:
    merged = vision.mm_hidden_size * math.prod(vision.merge_kernel_size)
    shapes = {
        "proj.0": (merged, merged),
        "proj.2": (vision.text_hidden_size, merged),
        "post_norm": (vision.text_hidden_size,),
    }
    for name, shape in shapes.items():
        yield TensorSpec(name=f"mm_projector.{name}.weight", dtype="BF16", shape=shape)


def _vision_tower(vision: VisionConfig) -> Iterator[TensorSpec]:
    width, patch = vision.vt_hidden_size, vision.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (width, 3, patch, patch),
        "patch_embed.pos_emb": (vision.init_pos_emb_height, vision.init_pos_emb_width, width),
        "encoder.final_layernorm": (width,),
    }
    for block in range(vision.vt_num_hidden_layers):
        prefix = f"encoder.blocks.{block}."
        shapes |= {
            f"{prefix}norm0": (width,),
            f"{prefix}norm1": (width,),
            f"{prefix}wqkv": (3 * vision.qkv_hidden_size, width),
            f"{prefix}wo": (width, vision.qkv_hidden_size),
            f"{prefix}mlp.fc0": (vision.vt_intermediate_size, width),
            f"{prefix}mlp.fc1": (width, vision.vt_intermediate_size),
        }
    for name, shape in shapes.items():
        yield TensorSpec(name=f"vision_tower.{name}.weight", dtype="BF16", shape=shape)
