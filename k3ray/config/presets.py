"""Named model presets, all of K3's shape: three KDA layers to one MLA, one more MLA at the end."""

from __future__ import annotations

from k3ray.config.model import LinearAttnConfig, ModelConfig, TextConfig, VisionConfig


def _full_attn_layers(num_layers: int) -> tuple[int, ...]:
    """Every fourth layer (1-based) and the last one, as in the release."""
    return tuple(sorted({*range(4, num_layers + 1, 4), num_layers}))


def _text(
    *, vocab: int, hidden: int, layers: int, heads: int, head_dim: int, experts: int,
    top_k: int, latent: int, moe_inter: int, dense_inter: int, lora: tuple[int, int],
    mla_dims: tuple[int, int, int], block: int, context: int,
) -> TextConfig:  # fmt: skip
    special = vocab - 256
    return TextConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=dense_inter,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=context, q_lora_rank=lora[0], kv_lora_rank=lora[1],
        qk_nope_head_dim=mla_dims[0], qk_rope_head_dim=mla_dims[1], v_head_dim=mla_dims[2],
        num_experts=experts, num_experts_per_token=top_k, num_shared_experts=2,
        moe_intermediate_size=moe_inter, routed_expert_hidden_size=latent,
        attn_res_block_size=block, bos_token_id=special, eos_token_id=special + 2,
        pad_token_id=vocab - 1,
        linear_attn_config=LinearAttnConfig(
            num_heads=heads, head_dim=head_dim, full_attn_layers=_full_attn_layers(layers)
        ),
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    "kimi-k3": ModelConfig(text_config=_text(
        vocab=163840, hidden=7168, layers=93, heads=96, head_dim=128, experts=896, top_k=16,
        latent=3584, moe_inter=3072, dense_inter=33792, lora=(1536, 512),
        mla_dims=(128, 64, 128), block=12, context=1048576), vision_config=VisionConfig()),
    "k3-mini": ModelConfig(text_config=_text(
        vocab=16640, hidden=512, layers=13, heads=8, head_dim=64, experts=64, top_k=4,
        latent=256, moe_inter=128, dense_inter=2048, lora=(192, 128),
        mla_dims=(64, 32, 64), block=4, context=32768)),
    "k3-bench28": ModelConfig(text_config=_text(
        vocab=4352, hidden=256, layers=8, heads=4, head_dim=64, experts=32, top_k=4,
        latent=128, moe_inter=224, dense_inter=1024, lora=(96, 64),
        mla_dims=(64, 32, 64), block=4, context=32768)),
    "k3-nano": ModelConfig(text_config=_text(
        vocab=4352, hidden=128, layers=9, heads=4, head_dim=32, experts=32, top_k=4,
        latent=64, moe_inter=64, dense_inter=512, lora=(64, 64),
        mla_dims=(32, 16, 32), block=3, context=8192)),
    "k3-tiny": ModelConfig(text_config=_text(
        vocab=512, hidden=64, layers=5, heads=2, head_dim=32, experts=8, top_k=2,
        latent=32, moe_inter=32, dense_inter=128, lora=(32, 32),
        mla_dims=(32, 16, 32), block=2, context=8192)),
}  # fmt: skip
"""The model presets by name."""
