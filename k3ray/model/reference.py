"""The whole model in one slow, readable file: the definition that the rest is tested against.

One document at a time, token by token where the formulas are (KDA), experts included, ordinary
autograd, formulas written out here and shared with no other module. Weights come as a mapping from
the release's names (without `language_model.`). Any float dtype; tests use float64.
Source: architecture.md sections 2 to 5. Legend: T tokens, X hidden, H heads, K head dim,
V vocabulary, N sources.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from k3ray.config.model import LayerKind, TextConfig

Weights = Mapping[str, torch.Tensor]


def reference_logits(cfg: TextConfig, weights: Weights, tokens_T: torch.Tensor) -> torch.Tensor:
    """Logits of every token of one document.

    Args:
        cfg: Model sizes.
        weights: Every tensor of the model, routed experts included.
        tokens_T: [T] int64.

    Returns:
        [T, V] in the weights' dtype.
    """
    current = weights["model.embed_tokens.weight"][tokens_T]
    bank: list[torch.Tensor] = []
    for layer in range(cfg.num_hidden_layers):
        own = _under(weights, f"model.layers.{layer}.")
        mixed = current
        if bank:
            mixed = _mix(cfg, [*bank, current], own, "self_attention_res")
        starts_block = layer % cfg.attn_res_block_size == 0
        if starts_block:
            bank.append(current)
        normed = _rms(mixed, own["input_layernorm.weight"], cfg.rms_norm_eps)
        attention = _kda if cfg.layer_kinds[layer] is LayerKind.KDA else _mla
        attended = attention(cfg, _under(own, "self_attn."), normed)
        current = attended if starts_block else current + attended
        mixed = _mix(cfg, [*bank, current], own, "mlp_res")
        normed = _rms(mixed, own["post_attention_layernorm.weight"], cfg.rms_norm_eps)
        if layer in cfg.moe_layers:
            current = current + _moe(cfg, _under(own, "block_sparse_moe."), normed)
        else:
            current = current + _mlp(cfg, _under(own, "mlp."), normed)
    mixed = _mix(cfg, [*bank, current], _under(weights, "model."), "output_attn_res")
    normed = _rms(mixed, weights["model.norm.weight"], cfg.rms_norm_eps)
    return normed @ weights["lm_head.weight"].T


def _under(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _mix(cfg: TextConfig, sources: list[torch.Tensor], own: Weights, name: str) -> torch.Tensor:
    """Block AttnRes: softmax over the sources of their normalised keys' scores."""
    stacked_TNX = torch.stack(sources, dim=1)
    keys_TNX = _rms(stacked_TNX, own[f"{name}_norm.weight"], cfg.rms_norm_eps)
    scores_TN = keys_TNX @ own[f"{name}_proj.weight"][0]
    return (scores_TN.softmax(-1).unsqueeze(-1) * stacked_TNX).sum(1)


def _conv_silu(x_TP: torch.Tensor, weight_P1J: torch.Tensor) -> torch.Tensor:
    kernel = weight_P1J.shape[-1]
    padded = functional.pad(x_TP, (0, 0, kernel - 1, 0))
    total = torch.zeros_like(x_TP)
    for tap in range(kernel):
        total = total + padded[tap : tap + len(x_TP)] * weight_P1J[:, 0, tap]
    return functional.silu(total)


def _kda(cfg: TextConfig, own: Weights, x_TX: torch.Tensor) -> torch.Tensor:
    heads, dim = cfg.linear_attn_config.num_heads, cfg.linear_attn_config.head_dim

    def split(x_TP: torch.Tensor) -> torch.Tensor:
        return x_TP.reshape(-1, heads, dim)

    def stream(name: str) -> torch.Tensor:
        projected = x_TX @ own[f"{name}_proj.weight"].T
        return split(_conv_silu(projected, own[f"{name}_conv1d.weight"]))

    def unit(x_THK: torch.Tensor) -> torch.Tensor:
        return x_THK / (x_THK.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()

    q_THK, k_THK, v_THK = unit(stream("q")) * dim**-0.5, unit(stream("k")), stream("v")
    z_TP = x_TX @ own["f_a_proj.weight"].T @ own["f_b_proj.weight"].T + own["dt_bias"]
    slope_H1 = own["A_log"][:heads].exp().unsqueeze(-1)
    decay_THK = (cfg.linear_attn_config.gate_lower_bound * (slope_H1 * split(z_TP)).sigmoid()).exp()
    beta_TH = (x_TX @ own["b_proj.weight"].T).sigmoid()
    state_HKV = x_TX.new_zeros(heads, dim, dim)
    outputs = []
    for q_HK, k_HK, v_HV, decay_HK, beta_H in zip(
        q_THK, k_THK, v_THK, decay_THK, beta_TH, strict=True
    ):
        state_HKV = decay_HK.unsqueeze(-1) * state_HKV
        error_HV = v_HV - torch.einsum("hkv,hk->hv", state_HKV, k_HK)
        state_HKV = state_HKV + torch.einsum("h,hk,hv->hkv", beta_H, k_HK, error_HV)
        outputs.append(torch.einsum("hkv,hk->hv", state_HKV, q_HK))
    normed_THK = _rms(torch.stack(outputs), own["o_norm.weight"], cfg.rms_norm_eps)
    gate_TP = (x_TX @ own["g_proj.weight"].T).sigmoid()
    return (normed_THK.flatten(1) * gate_TP) @ own["o_proj.weight"].T


def _mla(cfg: TextConfig, own: Weights, x_TX: torch.Tensor) -> torch.Tensor:
    heads, nope, rope = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    num_tokens = len(x_TX)
    low_rank = _rms(x_TX @ own["q_a_proj.weight"].T, own["q_a_layernorm.weight"], 1e-6)
    q_THQ = (low_rank @ own["q_b_proj.weight"].T).reshape(num_tokens, heads, nope + rope)
    latent_TC = x_TX @ own["kv_a_proj_with_mqa.weight"].T
    normed_TR = _rms(latent_TC[:, : cfg.kv_lora_rank], own["kv_a_layernorm.weight"], 1e-6)
    shared_T1B = latent_TC[:, None, cfg.kv_lora_rank :]
    kv = (normed_TR @ own["kv_b_proj.weight"].T).reshape(num_tokens, heads, -1)
    k_THQ = torch.cat((kv[..., :nope], shared_T1B.expand(-1, heads, -1)), dim=-1)
    scores_HTT = torch.einsum("thq,shq->hts", q_THQ, k_THQ) * (nope + rope) ** -0.5
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=x_TX.device).triu(1)
    probs_HTT = scores_HTT.masked_fill(future, float("-inf")).softmax(-1)
    out_THE = torch.einsum("hts,she->the", probs_HTT, kv[..., nope:])
    gate_TP = (x_TX @ own["g_proj.weight"].T).sigmoid()
    return (out_THE.flatten(1) * gate_TP) @ own["o_proj.weight"].T


def _situ(cfg: TextConfig, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    beta, linear_beta = cfg.activation_situ_beta, cfg.activation_situ_linear_beta
    bounded_up = up if linear_beta is None else linear_beta * (up / linear_beta).tanh()
    return beta * (gate / beta).tanh() * gate.sigmoid() * bounded_up


def _mlp(cfg: TextConfig, own: Weights, x_TX: torch.Tensor) -> torch.Tensor:
    hidden = _situ(cfg, x_TX @ own["gate_proj.weight"].T, x_TX @ own["up_proj.weight"].T)
    return hidden @ own["down_proj.weight"].T


def _expert(cfg: TextConfig, own: Weights, expert: int, latent_L: torch.Tensor) -> torch.Tensor:
    w1, w2, w3 = (own[f"experts.{expert}.{name}.weight"] for name in ("w1", "w2", "w3"))
    return w2 @ _situ(cfg, w1 @ latent_L, w3 @ latent_L)


def _moe(cfg: TextConfig, own: Weights, x_TX: torch.Tensor) -> torch.Tensor:
    scores_TE = (x_TX @ own["gate.weight"].T).sigmoid()
    biased_TE = scores_TE + own["gate.e_score_correction_bias"]
    latents_TL = x_TX @ own["routed_expert_down_proj.weight"].T
    sums = []
    for scores_E, biased_E, latent_L in zip(scores_TE, biased_TE, latents_TL, strict=True):
        chosen = sorted(biased_E.topk(cfg.num_experts_per_token).indices.tolist())
        total = scores_E[chosen].sum() + 1e-20
        weighted = [
            cfg.routed_scaling_factor * scores_E[e] / total * _expert(cfg, own, e, latent_L)
            for e in chosen
        ]
        sums.append(torch.stack(weighted).sum(0))
    normed_TL = _rms(torch.stack(sums), own["routed_expert_norm.weight"], cfg.rms_norm_eps)
    routed_TX = normed_TL @ own["routed_expert_up_proj.weight"].T
    return routed_TX + _mlp(cfg, _under(own, "shared_experts."), x_TX)
