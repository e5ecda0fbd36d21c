"""How an op is carried out: by a kernel where there is one, by autograd's function elsewhere."""

from __future__ import annotations

import os
from typing import Any

import torch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def by_kernel(x: torch.Tensor) -> bool:
    """Whether ops on `x` that have a Triton kernel use it: on GPUs, and anywhere under Triton's
    interpreter (`TRITON_INTERPRET=1`, for tests); kernels know no float64."""
    return (x.is_cuda or _INTERPRETED) and x.dtype != torch.float64


class _NoContext:
    """Takes what a forward keeps for its backward, and drops it."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        pass


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, or its bare forward where no gradient is recorded.

    A decode step makes some 200 such calls on tensors of a few rows: the bookkeeping of `apply`
    would cost more than the arithmetic.
    """
    if torch.is_grad_enabled():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return function.forward(_NoContext(), *args)
