"""One decoder layer and the Block AttnRes wiring around its two sublayers.

There is no additive residual stream: each sublayer reads a mix of the finished blocks (`bank`) and
the running sum of the open block (`current`), and adds its output to that sum only.
Legend: T tokens, X hidden channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from k3ray.config.model import LayerKind, TextConfig
from k3ray.model.executor import ExpertExecutor
from k3ray.model.kda_layer import KdaAttention
from k3ray.model.mla_layer import MlaAttention
from k3ray.model.modules import Linear, Placement, RmsNorm
from k3ray.model.moe_layer import LatentMoe, SituMlp
from k3ray.ops.attnres import attnres_mix

Attention = KdaAttention | MlaAttention
Attend = Callable[[Attention, torch.Tensor], torch.Tensor]
"""How an attention sublayer is run: over whole documents, or over spans and their state."""


def mix(sources: tuple[torch.Tensor, ...], norm: RmsNorm, pseudo_query: Linear) -> torch.Tensor:
    """AttnRes mix of sources [T, X] by a norm and a pseudo-query [1, X]."""
    weight_X = norm.weight * pseudo_query.weight[0]
    return attnres_mix(sources, weight_X, eps=norm.eps)


class DecoderLayer(nn.Module):
    """Attention and feed-forward of one layer.

    Args:
        cfg: Model sizes.
        place: Device and dtype.
        layer: 0-based.
    """

    def __init__(self, cfg: TextConfig, place: Placement, *, layer: int) -> None:
        super().__init__()
        width, eps = cfg.hidden_size, cfg.rms_norm_eps
        self.starts_block = layer % cfg.attn_res_block_size == 0
        self.self_attention_res_norm = RmsNorm(width, place, eps=eps)
        self.self_attention_res_proj = Linear(width, 1, place)
        self.input_layernorm = RmsNorm(width, place, eps=eps)
        self.self_attn = _attention(cfg, place, layer)
        self.mlp_res_norm = RmsNorm(width, place, eps=eps)
        self.mlp_res_proj = Linear(width, 1, place)
        self.post_attention_layernorm = RmsNorm(width, place, eps=eps)
        self.is_moe = layer in cfg.moe_layers
        if self.is_moe:
            self.block_sparse_moe = LatentMoe(cfg, place, layer=layer)
        else:
            self.mlp = SituMlp(cfg, place, inner=cfg.intermediate_size)

    def forward(
        self,
        bank: tuple[torch.Tensor, ...],
        current: torch.Tensor,
        attend: Attend,
        experts: ExpertExecutor,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            bank: Finished blocks [T, X]; the caller adds `current` to it after this call when
                `starts_block`.
            current: [T, X] running sum of the open block.
            attend: Runs the attention sublayer.
            experts: Where the routed experts run.

        Returns:
            [T, X] the new running sum.
        """
        mixed = current
        if bank:
            sources = (*bank, current)
            mixed = mix(sources, self.self_attention_res_norm, self.self_attention_res_proj)
        attended = attend(self.self_attn, self.input_layernorm(mixed))
        if self.starts_block:
            bank, current = (*bank, current), attended
        else:
            current = current + attended
        mixed = mix((*bank, current), self.mlp_res_norm, self.mlp_res_proj)
        normed = self.post_attention_layernorm(mixed)
        if self.is_moe:
            return current + self.block_sparse_moe(normed, experts)  # type: ignore[no-any-return]
        return current + self.mlp(normed)  # type: ignore[no-any-return]


def _attention(cfg: TextConfig, place: Placement, layer: int) -> Attention:
    kinds = cfg.layer_kinds
    index = kinds[:layer].count(kinds[layer])
    if kinds[layer] is LayerKind.KDA:
        return KdaAttention(cfg, place, index=index)
    return MlaAttention(cfg, place, index=index)
