"""RMS norm and L2 norm over the last dim, computed in float32 at least, backward by hand.

Legend: D the normalised dim.
"""

from __future__ import annotations

from typing import Any

import torch

from k3ray.ops.activation import wide_dtype
from k3ray.ops.function import call


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight.

    Args:
        x: [..., D] float.
        weight_D: [D] float.
        eps: Inside the root.

    Returns:
        [..., D] in the dtype of `x`.
    """
    return call(_RmsNorm, x, weight_D, eps)  # type: ignore[no-any-return]


def l2_norm(x: torch.Tensor, *, scale: float = 1.0, eps: float = 1e-6) -> torch.Tensor:
    """scale * x * rsqrt(sum(x^2) + eps).

    Args:
        x: [..., D] float.
        scale: Factor of the result.
        eps: Inside the root.

    Returns:
        [..., D] float32 at least.
    """
    return call(_L2Norm, x, scale, eps)  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(wide_dtype(x.dtype))
        inv = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, inv)
        return (wide * inv).mul_(weight_D).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight_D, inv = ctx.saved_tensors
        dy = grads[0].to(inv.dtype)
        unit = x.to(inv.dtype) * inv
        dunit = dy * unit
        dweight_D = dunit.flatten(0, -2).sum(0).to(weight_D.dtype)
        mean = dunit.mul_(weight_D).mean(-1, keepdim=True)
        dx = (dy * weight_D).sub_(unit.mul_(mean)).mul_(inv)
        return dx.to(x.dtype), dweight_D, None


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, eps: float) -> torch.Tensor:
        wide = x.to(wide_dtype(x.dtype))
        inv = wide.square().sum(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inv)
        ctx.scale = scale
        return wide * (inv * scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, inv = ctx.saved_tensors
        dy = grads[0]
        unit = x.to(inv.dtype) * inv
        along = (dy * unit).sum(-1, keepdim=True)
        dx = (dy - unit.mul_(along)).mul_(inv * ctx.scale)
        return dx.to(x.dtype), None, None
