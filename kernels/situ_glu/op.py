"""SiTU-GLU as a Triton kernel with its gradients.

Each element is computed on its own, in float32, by the same operations wherever it lies: bits do
not depend on shape, place or launch size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.runtime import launch_size

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def situ_glu(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float | None
) -> torch.Tensor:
    """SiTU-GLU; differentiable in gate and up.

    Args:
        gate: [..., F] float32, bfloat16 or float16; its last dim contiguous, other dims such that
            they collapse to rows of one stride (a half of a fused product is fine).
        up: As `gate`, of the same shape and dtype; its stride may differ.
        beta: Bound of the gate branch, positive.
        linear_beta: Bound of the up branch, positive; None leaves it linear.

    Returns:
        [..., F] contiguous, in the dtype of `gate`.

    Raises:
        ValueError: shapes or dtypes differ, a dtype is not one of the three, a bound is not
            positive.

    Source: Kimi K3 technical report, section 2.3; `reference.py` is the definition.
    """
    _check((gate, up), beta, linear_beta)
    out: torch.Tensor = _SituGlu.apply(gate, up, beta, linear_beta)  # type: ignore[no-untyped-call]
    return out


def situ_glu_grads(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *, beta: float,
    linear_beta: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients for callers without autograd.

    Args:
        gate, up, beta, linear_beta: As in `situ_glu`.
        grad: Gradient of the result, of the same shape and dtype.

    Returns:
        (grad_gate, grad_up), each contiguous, in the dtype of `gate`.

    Raises:
        ValueError: As `situ_glu`.
    """
    _check((gate, up, grad), beta, linear_beta)
    grad_gate, grad_up = _grads(_rows(gate), _rows(up), grad, beta, linear_beta)
    return grad_gate.view(gate.shape), grad_up.view(gate.shape)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh by exp; near 0, where that would cancel, the series up to x^9."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    s = tl.minimum(size, 0.25) * tl.minimum(size, 0.25)
    tail = -0.3333333333 + s * (0.1333333333 + s * (-0.0539682540 + s * 0.0218694885))
    near = x + x * s * tail
    return tl.where(size < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _tanh_slope(x):  # type: ignore[no-untyped-def]
    """1 - tanh(x)^2, without the cancellation of that form where tanh is near 1."""
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """Never the exp of a positive number."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _float_row(ptr, row, column, stride, width):  # type: ignore[no-untyped-def]
    """A row's columns in float32; 0 past its end."""
    return tl.load(ptr + row * stride + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def situ_glu_forward(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, width, gate_stride, up_stride, beta, linear_beta,
    BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = _float_row(gate_ptr, row, column, gate_stride, width)
    u = _float_row(up_ptr, row, column, up_stride, width)
    bounded = u
    if BOUNDED:
        bounded = linear_beta * _tanh(u / linear_beta)
    out = beta * _tanh(g / beta) * _sigmoid(g) * bounded
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def situ_glu_backward(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, width, gate_stride, up_stride,
    beta, linear_beta, BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of one row; the forward is computed again, not stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = _float_row(gate_ptr, row, column, gate_stride, width)
    u = _float_row(up_ptr, row, column, up_stride, width)
    dy = _float_row(grad_ptr, row, column, width, width)
    t, s = _tanh(g / beta), _sigmoid(g)
    bounded, slope_up = u, u * 0.0 + 1.0
    if BOUNDED:
        bounded = linear_beta * _tanh(u / linear_beta)
        slope_up = _tanh_slope(u / linear_beta)
    # d/dg [beta t s] = s (1 - t^2) + beta t s (1 - s), and 1 - s = sigmoid(-g)
    slope_gate = s * _tanh_slope(g / beta) + beta * t * s * _sigmoid(-g)
    grad_gate = dy * bounded * slope_gate
    grad_up = dy * beta * t * s * slope_up
    at = row * width + column
    tl.store(grad_gate_ptr + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + at, grad_up.to(grad_up_ptr.dtype.element_ty), mask=inside)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None
    ) -> torch.Tensor:
        gate_NF, up_NF = _rows(gate), _rows(up)
        ctx.save_for_backward(gate_NF, up_NF)
        ctx.bounds, ctx.shape = (beta, linear_beta), gate.shape
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if out.numel():
            grid, launch = _launch(gate_NF)
            situ_glu_forward[grid](
                gate_NF, up_NF, out, gate_NF.shape[1], gate_NF.stride(0), up_NF.stride(0),
                beta, linear_beta or 1.0, BOUNDED=linear_beta is not None,
                BLOCK=launch.block, num_warps=launch.num_warps,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        gate_NF, up_NF = ctx.saved_tensors
        grad_gate, grad_up = _grads(gate_NF, up_NF, grads[0], *ctx.bounds)
        return grad_gate.view(ctx.shape), grad_up.view(ctx.shape), None, None


def _grads(
    gate_NF: torch.Tensor, up_NF: torch.Tensor, grad: torch.Tensor, beta: float,
    linear_beta: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    grad_NF = grad.reshape(gate_NF.shape).contiguous()
    grad_gate = torch.empty(gate_NF.shape, dtype=gate_NF.dtype, device=gate_NF.device)
    grad_up = torch.empty_like(grad_gate)
    if grad_NF.numel():
        grid, launch = _launch(gate_NF)
        situ_glu_backward[grid](
            gate_NF, up_NF, grad_NF, grad_gate, grad_up, gate_NF.shape[1], gate_NF.stride(0),
            up_NF.stride(0), beta, linear_beta or 1.0, BOUNDED=linear_beta is not None,
            BLOCK=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return grad_gate, grad_up


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[N, F] with a contiguous last dim; copies only where strides do not allow a view."""
    width = x.shape[-1] if x.dim() else 1
    rows_NF = x.reshape(math.prod(x.shape[:-1]), width)
    return rows_NF if rows_NF.stride(1) == 1 or rows_NF.shape[1] == 1 else rows_NF.contiguous()


def _launch(rows_NF: torch.Tensor) -> tuple[tuple[int, int], Any]:
    launch = launch_size("situ_glu", rows_NF.device)
    return (rows_NF.shape[0], triton.cdiv(rows_NF.shape[1], launch.block)), launch


def _check(tensors: tuple[torch.Tensor, ...], beta: float, linear_beta: float | None) -> None:
    first = tensors[0]
    for each in tensors[1:]:
        if (each.shape, each.dtype, each.device) != (first.shape, first.dtype, first.device):
            raise ValueError(f"operands must agree, got {_shown(first)} and {_shown(each)}")
    if first.dtype not in _DTYPES:
        raise ValueError(f"{first.dtype} is not one of {', '.join(map(str, _DTYPES))}")
    if beta <= 0 or (linear_beta is not None and linear_beta <= 0):
        raise ValueError(f"bounds must be positive, got {beta} and {linear_beta}")


def _shown(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"
