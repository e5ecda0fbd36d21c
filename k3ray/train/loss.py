"""Next-token loss, without ever holding the logits of a whole batch.

The logits of 4,096 tokens over K3's vocabulary would take 2.7 GB, three times with their gradient:
the head's product and the softmax run on a few rows at a time, which also stay in the cache.
Legend: T tokens, X hidden channels, V vocabulary, R rows of a piece.
"""

from __future__ import annotations

from typing import Any

import torch

from k3ray.ops.activation import wide_dtype
from k3ray.ops.function import call
from k3ray.ops.linear import row_linear

IGNORED = -100
"""Target of a token on which no loss is taken."""

PIECE_ROWS = 512
"""Rows whose logits exist at one time."""


def head_loss_sum(
    hidden_TX: torch.Tensor, weight_VX: torch.Tensor, targets_T: torch.Tensor
) -> torch.Tensor:
    """Sum of the negative log-likelihoods in nats of `hidden @ weight.T`, a scalar.

    The sum, not the mean: a step's loss is the mean over the tokens of the whole step, so the
    caller divides once, by the count over all micro-batches. Differentiable in hidden and weight;
    the gradients are computed together with the value.

    Args:
        hidden_TX: [T, X] float.
        weight_VX: [V, X] of the same dtype, the language model's head.
        targets_T: [T] int64, `IGNORED` where no loss is taken.

    Returns:
        float32, or float64 for a float64 model.
    """
    return call(_HeadLoss, hidden_TX, weight_VX, targets_T)  # type: ignore[no-any-return]


def num_targets(targets_T: torch.Tensor) -> int:
    """How many tokens carry loss."""
    return int((targets_T != IGNORED).sum())


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TX: torch.Tensor, weight_VX: torch.Tensor, targets_T: torch.Tensor
    ) -> torch.Tensor:
        dtype = wide_dtype(hidden_TX.dtype)
        nats = torch.zeros((), dtype=torch.float64, device=hidden_TX.device)
        trained = any(getattr(ctx, "needs_input_grad", ()))
        dhidden_TX = torch.empty_like(hidden_TX) if trained else None
        dweight_VX = torch.zeros_like(weight_VX) if trained else None
        for start in range(0, len(hidden_TX), PIECE_ROWS):
            own = slice(start, start + PIECE_ROWS)
            logits_RV = row_linear(hidden_TX[own], weight_VX).to(dtype)
            counted_R1 = (targets_T[own] != IGNORED).unsqueeze(1)
            target_R1 = targets_T[own].clamp_min(0).unsqueeze(1)
            picked_R1 = logits_RV.gather(1, target_R1)
            peak_R1 = logits_RV.amax(1, keepdim=True)
            exps_RV = logits_RV.sub_(peak_R1).exp_()
            total_R1 = exps_RV.sum(1, keepdim=True)
            losses_R1 = total_R1.log().add_(peak_R1).sub_(picked_R1)
            nats += losses_R1.masked_fill_(~counted_R1, 0.0).sum(dtype=torch.float64)
            if dhidden_TX is None or dweight_VX is None:
                continue
            # softmax - one-hot, zero where no loss is taken
            dlogits_RV = exps_RV.mul_(counted_R1 / total_R1)
            dlogits_RV.scatter_add_(1, target_R1, -counted_R1.to(dtype))
            dlogits_RV = dlogits_RV.to(hidden_TX.dtype)
            torch.mm(dlogits_RV, weight_VX, out=dhidden_TX[own])
            dweight_VX.addmm_(dlogits_RV.T, hidden_TX[own])
        if trained:
            ctx.save_for_backward(dhidden_TX, dweight_VX)
        return nats.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dhidden_TX, dweight_VX = ctx.saved_tensors
        scale = grads[0]
        return (
            dhidden_TX * scale.to(dhidden_TX.dtype),
            dweight_VX * scale.to(dweight_VX.dtype),
            None,
        )
