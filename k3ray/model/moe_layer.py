"""The feed-forward sublayers: dense SiTU MLP, and LatentMoE around experts that live elsewhere.

Legend: T tokens, X hidden channels, E experts, K experts per token, L latent width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from k3ray.config.model import TextConfig
from k3ray.model.executor import ExpertExecutor, TrainableExpertExecutor
from k3ray.model.modules import Linear, Placement, RmsNorm
from k3ray.ops.activation import situ_glu
from k3ray.ops.function import call
from k3ray.ops.linear import row_linear
from k3ray.ops.routing import combine, route


class SituMlp(nn.Module):
    """down(SiTU-GLU(gate(x), up(x))): the dense layers and the shared experts.

    Args:
        cfg: Model sizes.
        place: Device and dtype.
        inner: Inner width.
    """

    def __init__(self, cfg: TextConfig, place: Placement, *, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(cfg.hidden_size, inner, place)
        self.up_proj = Linear(cfg.hidden_size, inner, place)
        self.down_proj = Linear(inner, cfg.hidden_size, place)
        self.beta = cfg.activation_situ_beta
        self.linear_beta = cfg.activation_situ_linear_beta

    def forward(self, x_TX: torch.Tensor) -> torch.Tensor:
        """[T, X] to [T, X]."""
        hidden = situ_glu(
            self.gate_proj(x_TX), self.up_proj(x_TX), beta=self.beta, linear_beta=self.linear_beta
        )
        return self.down_proj(hidden)  # type: ignore[no-any-return]


class Router(nn.Module):
    """Sigmoid router with a selection bias (a buffer: no gradient ever moves it).

    Args:
        cfg: Model sizes.
        place: Device and dtype.
    """

    e_score_correction_bias: torch.Tensor

    def __init__(self, cfg: TextConfig, place: Placement) -> None:
        super().__init__()
        self.weight = place.zeros(cfg.num_experts, cfg.hidden_size)
        bias = torch.zeros(cfg.num_experts, device=place.device, dtype=place.wide)
        self.register_buffer("e_score_correction_bias", bias)
        self.top_k, self.scaling = cfg.num_experts_per_token, cfg.routed_scaling_factor

    def forward(self, x_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [T, K] int64 ascending, weights [T, K] float32)."""
        wide = self.e_score_correction_bias.dtype
        logits_TE = row_linear(x_TX.to(wide), self.weight.to(wide))
        return route(
            logits_TE, self.e_score_correction_bias, top_k=self.top_k, scaling=self.scaling
        )


class LatentMoe(nn.Module):
    """Everything of a MoE layer but its routed experts; architecture.md section 5.

    Args:
        cfg: Model sizes.
        place: Device and dtype.
        layer: 0-based decoder layer, the experts' address.
    """

    def __init__(self, cfg: TextConfig, place: Placement, *, layer: int) -> None:
        super().__init__()
        width, latent = cfg.hidden_size, cfg.routed_expert_hidden_size
        self.layer = layer
        self.gate = Router(cfg, place)
        self.routed_expert_down_proj = Linear(width, latent, place)
        self.routed_expert_norm = RmsNorm(latent, place, eps=cfg.rms_norm_eps)
        self.routed_expert_up_proj = Linear(latent, width, place)
        shared = cfg.num_shared_experts * cfg.moe_intermediate_size
        self.shared_experts = SituMlp(cfg, place, inner=shared)

    def forward(self, x_TX: torch.Tensor, experts: ExpertExecutor) -> torch.Tensor:
        """[T, X] to [T, X]."""
        ids_TK, weights_TK = self.gate(x_TX)
        latents_TL = self.routed_expert_down_proj(x_TX).to(weights_TK.dtype)
        rows_TKL = call(_ExpertRows, latents_TL, ids_TK, experts, self.layer)
        routed_TL = combine(rows_TKL, weights_TK).to(x_TX.dtype)
        routed_TX = self.routed_expert_up_proj(self.routed_expert_norm(routed_TL))
        return routed_TX + self.shared_experts(x_TX)  # type: ignore[no-any-return]


class _ExpertRows(torch.autograd.Function):
    """The hop to the experts and back, in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        latents_TL: torch.Tensor,
        ids_TK: torch.Tensor,
        experts: ExpertExecutor,
        layer: int,
    ) -> torch.Tensor:
        ctx.experts, ctx.layer = experts, layer
        return experts.forward(layer, latents_TL, ids_TK)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        experts = cast(TrainableExpertExecutor, ctx.experts)
        return experts.backward(ctx.layer, grads[0].contiguous()), None, None, None
