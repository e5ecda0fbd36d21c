"""The one door to `torch.autograd.Function`: typed, and without autograd's cost where it is off."""

from __future__ import annotations

from typing import Any

import torch


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
