"""The two parameter holders every layer is made of: bias-free `Linear` and `RmsNorm`.

Parameters start at zero (norms at one); `k3ray.model.init` or a checkpoint fills them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from k3ray.config.numeric import NumericMode
from k3ray.ops.linear import row_linear
from k3ray.ops.norm import rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where parameters live, their dtype (the few float32 ones of the release stay wide), and the
    numeric mode of the layers that are made of them."""

    device: torch.device | str
    dtype: torch.dtype
    numeric: NumericMode = NumericMode.DETERMINISTIC

    @property
    def wide(self) -> torch.dtype:
        """Dtype of parameters that the release keeps in float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def zeros(self, *shape: int, wide: bool = False) -> nn.Parameter:
        """A zeroed parameter."""
        dtype = self.wide if wide else self.dtype
        return nn.Parameter(torch.zeros(*shape, device=self.device, dtype=dtype))


class Linear(nn.Module):
    """x @ weight.T with weight [out, in]; fast mode does not pad rows."""

    def __init__(self, inputs: int, outputs: int, place: Placement) -> None:
        super().__init__()
        self.weight = place.zeros(outputs, inputs)
        deterministic = place.numeric is NumericMode.DETERMINISTIC
        self._product = row_linear if deterministic else functional.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        return self._product(x, self.weight)


class RmsNorm(nn.Module):
    """RMS norm over the last dim with a weight."""

    def __init__(self, dim: int, place: Placement, *, eps: float, wide: bool = False) -> None:
        super().__init__()
        self.weight = place.zeros(dim, wide=wide)
        nn.init.ones_(self.weight)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., D]."""
        return rms_norm(x, self.weight, eps=self.eps)
