"""Parameter arithmetic from the config alone, in plain Python (`architecture.md` 1.4).

`count_parameters(PRESETS["kimi-k3"].text_config)` gives the release's 2,779,484,476,000 text
parameters, 104,189,612,640 of them active for a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3ray.config.model import LayerKind, TextConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Numbers of text parameters. `active` counts the chosen experts and everything dense but
    the input embedding table (the output head is counted)."""

    total: int
    active: int
    embedding: int
    per_expert: int
    routed_experts: int

    @property
    def dense(self) -> int:
        """Everything but the routed experts: what an attention stack holds."""
        return self.total - self.routed_experts


def count_parameters(cfg: TextConfig) -> ParameterCount:
    """Count the parameters of the language model.

    >>> from k3ray.config.presets import PRESETS
    >>> count_parameters(PRESETS["kimi-k3"].text_config).total
    2779484476000
    """
    hidden, num_moe = cfg.hidden_size, len(cfg.moe_layers)
    attention = {LayerKind.KDA: kda_layer(cfg), LayerKind.MLA: mla_layer(cfg)}
    per_layer_mixing = 2 * hidden + 4 * hidden  # two norms; two AttnRes norms and pseudo-queries
    embedding = cfg.vocab_size * hidden
    dense = (
        sum(attention[kind] + per_layer_mixing for kind in cfg.layer_kinds)
        + num_moe * moe_trunk(cfg)
        + (cfg.num_hidden_layers - num_moe) * 3 * hidden * cfg.intermediate_size
        + 2 * embedding
        + 3 * hidden  # final norm, output AttnRes norm and pseudo-query
    )
    per_expert = 3 * cfg.routed_expert_hidden_size * cfg.moe_intermediate_size
    routed = num_moe * cfg.num_experts * per_expert
    active = dense - embedding + num_moe * cfg.num_experts_per_token * per_expert
    return ParameterCount(
        total=dense + routed,
        active=active,
        embedding=embedding,
        per_expert=per_expert,
        routed_experts=routed,
    )


def kda_layer(cfg: TextConfig) -> int:
    """Parameters of one KDA attention (q, k, v, g, o; decay; beta; convolutions; output norm)."""
    linear, hidden = cfg.linear_attn_config, cfg.hidden_size
    heads, head_dim = linear.num_heads, linear.head_dim
    width = heads * head_dim
    decay = head_dim * hidden + width * head_dim + heads + width  # f_a, f_b, A_log, dt_bias
    convolutions = 3 * width * linear.short_conv_kernel_size
    return 5 * width * hidden + decay + heads * hidden + convolutions + head_dim


def mla_layer(cfg: TextConfig) -> int:
    """Parameters of one gated MLA attention, its two inner norms included."""
    hidden, heads = cfg.hidden_size, cfg.num_attention_heads
    query = cfg.q_lora_rank * (hidden + 1)
    query += heads * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) * cfg.q_lora_rank
    key_value = (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * hidden + cfg.kv_lora_rank
    key_value += heads * (cfg.qk_nope_head_dim + cfg.v_head_dim) * cfg.kv_lora_rank
    gate_and_output = 2 * heads * cfg.v_head_dim * hidden
    return query + key_value + gate_and_output


def moe_trunk(cfg: TextConfig) -> int:
    """Parameters of one LatentMoE layer without its routed experts."""
    hidden, latent = cfg.hidden_size, cfg.routed_expert_hidden_size
    router = cfg.num_experts * (hidden + 1)
    shared = 3 * hidden * cfg.num_shared_experts * cfg.moe_intermediate_size
    return router + 2 * latent * hidden + latent + shared
