"""Sigmoid, SiLU and SiTU-GLU, written with `exp`: a row's bits do not depend on its mates.

ATen's own sigmoid and SiLU change bits with the element count (design, section 5); `exp` and `tanh`
do not. Each has a hand-written backward that is finite for every finite input. Half-precision
inputs are computed in float32 and cast back.
"""

from __future__ import annotations

from typing import Any

import torch

from k3ray.ops.function import by_kernel, call


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 at least, float64 stays."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), any shape and float dtype; exactly 0 below about -88 in float32."""
    return call(_Sigmoid, x)  # type: ignore[no-any-return]


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), any shape and float dtype."""
    return call(_Silu, x)  # type: ignore[no-any-return]


def situ_glu(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float | None
) -> torch.Tensor:
    """SiTU-GLU: beta*tanh(gate/beta)*sigmoid(gate) * linear_beta*tanh(up/linear_beta).

    Args:
        gate: [..., F] float.
        up: [..., F] float.
        beta: Bound of the gate branch.
        linear_beta: Bound of the up branch; None leaves it linear.

    Returns:
        [..., F] in the dtype of `gate`; at most beta * linear_beta in size.

    Source: Kimi K3 technical report, section 2.3; release `activation_situ_*`.
    """
    if by_kernel(gate):
        from kernels.situ_glu import situ_glu as kernel

        return kernel(gate, up, beta=beta, linear_beta=linear_beta)
    return call(_SituGlu, gate, up, beta, linear_beta)  # type: ignore[no-any-return]


def situ_glu_with_grads(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    *,
    beta: float,
    linear_beta: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`situ_glu` and its gradients at once, for a backward without autograd that kept the inputs.

    Args:
        gate: [..., F] as in the forward.
        up: [..., F] as in the forward.
        grad: [..., F] gradient of the result.
        beta: As in the forward.
        linear_beta: As in the forward.

    Returns:
        (result, grad_gate, grad_up), each [..., F]; the result has the bits of `situ_glu`.
    """
    if by_kernel(gate):
        from kernels.situ_glu import situ_glu as kernel
        from kernels.situ_glu import situ_glu_grads as kernel_grads

        out = kernel(gate, up, beta=beta, linear_beta=linear_beta)
        return out, *kernel_grads(gate, up, grad, beta=beta, linear_beta=linear_beta)
    dtype = wide_dtype(gate.dtype)
    kept = _situ_parts(gate.to(dtype), up.to(dtype), beta, linear_beta)
    out = _situ_value(kept, beta, linear_beta).to(gate.dtype)
    grad_gate, grad_up = _situ_grads(kept, grad.to(dtype), beta, linear_beta)
    return out, grad_gate.to(gate.dtype), grad_up.to(up.dtype)


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _situ_parts(
    gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None
) -> _Parts:
    """tanh(gate / beta), sigmoid(gate), and tanh(up / linear_beta) or `up` itself."""
    bounded = up if linear_beta is None else torch.tanh(up / linear_beta)
    return torch.tanh(gate / beta), _sigmoid(gate), bounded


def _situ_value(kept: _Parts, beta: float, linear_beta: float | None) -> torch.Tensor:
    t, s, bounded = kept
    return (t * s).mul_(beta * (1.0 if linear_beta is None else linear_beta)).mul_(bounded)


def _situ_grads(
    kept: _Parts, dy: torch.Tensor, beta: float, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    t, s, bounded = kept
    scaled_up = bounded if linear_beta is None else bounded * linear_beta
    scaled_gate = (t * s).mul_(beta)
    # d/dg [beta t s] = s (1 - t^2) + beta t s (1 - s) = s (1 - t^2) + scaled - scaled s
    slope_gate = torch.addcmul(s, s * t, t, value=-1.0)
    slope_gate.add_(scaled_gate).addcmul_(scaled_gate, s, value=-1.0)
    grad_gate = slope_gate.mul_(dy).mul_(scaled_up)
    grad_up = scaled_gate.mul_(dy)
    if linear_beta is not None:
        grad_up.addcmul_(grad_up * bounded, bounded, value=-1.0)
    return grad_gate, grad_up


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    # exp(-x) may overflow to inf, and 1 / inf is the right limit; no branch on the sign is needed.
    return torch.exp(-x).add_(1.0).reciprocal_()


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        s = _sigmoid(x.to(wide_dtype(x.dtype))).to(x.dtype)
        ctx.save_for_backward(s)
        return s

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (s,) = ctx.saved_tensors
        dx: torch.Tensor = (1.0 - s).mul_(s).mul_(grads[0])
        return dx


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        wide = x.to(wide_dtype(x.dtype))
        return _sigmoid(wide).mul_(wide).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        wide = x.to(wide_dtype(x.dtype))
        s = _sigmoid(wide)
        # s + x s (1 - s), with the product first so that a large |x| meets an exact zero.
        slope = (1.0 - s).mul_(s).mul_(wide).add_(s)
        dx: torch.Tensor = slope.mul_(grads[0]).to(x.dtype)
        return dx


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None
    ) -> torch.Tensor:
        dtype = wide_dtype(gate.dtype)
        # The parts are kept, not the inputs: a tanh costs as much as ten multiplications.
        kept = _situ_parts(gate.to(dtype), up.to(dtype), beta, linear_beta)
        ctx.save_for_backward(*kept)
        ctx.bounds = (beta, linear_beta)
        ctx.dtypes = (gate.dtype, up.dtype)
        return _situ_value(kept, beta, linear_beta).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        t, s, bounded = ctx.saved_tensors
        grad_gate, grad_up = _situ_grads((t, s, bounded), grads[0].to(t.dtype), *ctx.bounds)
        return grad_gate.to(ctx.dtypes[0]), grad_up.to(ctx.dtypes[1]), None, None
