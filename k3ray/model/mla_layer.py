"""The gated MLA sublayer: low-rank queries, one shared latent per token, no rotary part.

Training expands keys and values per head; serving keeps latents in pages and absorbs the expansion
into queries and outputs. Legend: T tokens, X hidden channels, H heads, D unshared key dim ("nope"),
B shared key dim ("rope", never rotated), E value dim, R latent, C = R + B, S, L spans and length.
"""

from __future__ import annotations

import torch
from torch import nn

from k3ray.config.model import TextConfig
from k3ray.config.numeric import NumericMode
from k3ray.model.modules import Linear, Placement, RmsNorm
from k3ray.model.serve_state import ServeState
from k3ray.model.serve_step import AttentionGroup, ServeStep
from k3ray.ops.activation import sigmoid
from k3ray.ops.attention import (
    causal_attention,
    documents_attention,
    latent_attention,
    paged_attention,
)
from k3ray.ops.linear import row_bmm
from k3ray.ops.ragged import RaggedLayout

LORA_NORM_EPS = 1e-6
"""The release's two low-rank norms keep their class default, unlike all other text norms."""


class MlaAttention(nn.Module):
    """Gated multi-head latent attention of one layer; architecture.md section 3.

    Args:
        cfg: Model sizes.
        place: Device, dtype and numeric mode.
        index: Place among the MLA layers, the index into the serving state.
    """

    def __init__(self, cfg: TextConfig, place: Placement, *, index: int) -> None:
        super().__init__()
        width, heads = cfg.hidden_size, cfg.num_attention_heads
        self.heads, self.index, self.numeric = heads, index, place.numeric
        self.nope_dim, self.rope_dim = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
        self.value_dim, self.latent_dim = cfg.v_head_dim, cfg.kv_lora_rank
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5
        inner = heads * self.value_dim
        self.q_a_proj = Linear(width, cfg.q_lora_rank, place)
        self.q_a_layernorm = RmsNorm(cfg.q_lora_rank, place, eps=LORA_NORM_EPS)
        self.q_b_proj = Linear(cfg.q_lora_rank, heads * (self.nope_dim + self.rope_dim), place)
        self.kv_a_proj_with_mqa = Linear(width, self.latent_dim + self.rope_dim, place)
        self.kv_a_layernorm = RmsNorm(self.latent_dim, place, eps=LORA_NORM_EPS)
        self.kv_b_proj = Linear(self.latent_dim, heads * (self.nope_dim + self.value_dim), place)
        self.g_proj = Linear(width, inner, place)
        self.o_proj = Linear(inner, width, place)

    def forward(self, x_TX: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
        """[T, X] of whole documents: expanded in fast mode, absorbed in deterministic mode."""
        if self.numeric is NumericMode.DETERMINISTIC:
            return self._forward_absorbed(x_TX, layout)
        q_THQ = self._queries(x_TX)
        latent_TR, shared_TB = self._latents(x_TX)
        kv: torch.Tensor = self.kv_b_proj(latent_TR)
        k_THD, v_THE = torch.split(
            kv.view(len(kv), self.heads, -1), [self.nope_dim, self.value_dim], dim=-1
        )
        shared_THB = shared_TB.unsqueeze(1).expand(-1, self.heads, -1)
        k_THQ = torch.cat((k_THD, shared_THB), dim=-1)
        out_THE = causal_attention(q_THQ, k_THQ, v_THE, layout=layout, scale=self.scale)
        return self._output(x_TX, out_THE)

    def serve(self, x_TX: torch.Tensor, step: ServeStep) -> torch.Tensor:
        """[T, X] of spans, absorbed; writes the spans' latents into their pages."""
        pages_GSC = step.state.latents_MGSC[self.index]
        rows_TC = torch.cat(self._latents(x_TX), dim=-1).to(pages_GSC.dtype)
        pages_GSC.flatten(0, 1).index_copy_(0, step.page_rows_T, rows_TC)
        q_THC = self._absorbed_queries(x_TX)
        mixed_THR = q_THC.new_empty(*q_THC.shape[:2], self.latent_dim)
        for group in step.groups:
            mixed_THR[group.rows_SL] = self._attend(q_THC, step.state, group).to(q_THC.dtype)
        return self._output(x_TX, self._expanded_values(mixed_THR))

    def _forward_absorbed(self, x_TX: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
        rows_TC = torch.cat(self._latents(x_TX), dim=-1)
        q_THC = self._absorbed_queries(x_TX)
        wide = torch.promote_types(q_THC.dtype, torch.float32)
        mixed_THR = documents_attention(
            q_THC.to(wide),
            rows_TC.to(wide),
            layout=layout,
            latent_dim=self.latent_dim,
            scale=self.scale,
        )
        return self._output(x_TX, self._expanded_values(mixed_THR.to(q_THC.dtype)))

    def _absorbed_queries(self, x_TX: torch.Tensor) -> torch.Tensor:
        """[T, H, C] queries in the channels of the cache."""
        nope_THD, shared_THB = torch.split(
            self._queries(x_TX), [self.nope_dim, self.rope_dim], dim=-1
        )
        absorbed_HTR = row_bmm(nope_THD.transpose(0, 1), self._ups()[0])
        return torch.cat((absorbed_HTR.transpose(0, 1), shared_THB), dim=-1)

    def _expanded_values(self, mixed_THR: torch.Tensor) -> torch.Tensor:
        """[T, H, E] from mixed latents."""
        out_HTE = row_bmm(mixed_THR.transpose(0, 1), self._ups()[1].transpose(1, 2))
        return out_HTE.transpose(0, 1)

    def _ups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The expansion of keys [H, D, R] and of values [H, E, R]."""
        up_HFR = self.kv_b_proj.weight.view(self.heads, -1, self.latent_dim)
        k_up_HDR, v_up_HER = torch.split(up_HFR, [self.nope_dim, self.value_dim], dim=1)
        return k_up_HDR, v_up_HER

    def _attend(
        self, q_THC: torch.Tensor, state: ServeState, group: AttentionGroup
    ) -> torch.Tensor:
        pages_SPJC = state.latents_MGSC[self.index][group.pages_SP]
        cache_SJC = pages_SPJC.flatten(1, 2)
        # Padding pages may be somebody else's: their values must not reach a product, even times 0.
        cache_SJC.masked_fill_(group.unused_SJ.unsqueeze(-1), 0.0)
        q_SLHC = q_THC[group.rows_SL]
        if state.numeric is NumericMode.FAST:
            return latent_attention(
                q_SLHC,
                cache_SJC.to(q_THC.dtype),
                group.positions_SL,
                latent_dim=self.latent_dim,
                scale=self.scale,
            )
        wide = torch.promote_types(q_THC.dtype, torch.float32)
        return paged_attention(
            q_SLHC.to(wide),
            pages_SPJC.to(wide),
            group.positions_SL,
            latent_dim=self.latent_dim,
            scale=self.scale,
        )

    def _queries(self, x_TX: torch.Tensor) -> torch.Tensor:
        q_TP: torch.Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TX)))
        return q_TP.view(len(q_TP), self.heads, -1)

    def _latents(self, x_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised latent [T, R] and the shared key part [T, B]."""
        latent_TR, shared_TB = torch.split(
            self.kv_a_proj_with_mqa(x_TX), [self.latent_dim, self.rope_dim], dim=-1
        )
        return self.kv_a_layernorm(latent_TR), shared_TB

    def _output(self, x_TX: torch.Tensor, out_THE: torch.Tensor) -> torch.Tensor:
        gated_TP = out_THE.flatten(1) * sigmoid(self.g_proj(x_TX))
        return self.o_proj(gated_TP)  # type: ignore[no-any-return]
