"""SiTU-GLU in plain PyTorch: the definition.

Source: Kimi K3 technical report, section 2.3.
"""

from __future__ import annotations

import torch


def situ_glu_reference(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float | None
) -> torch.Tensor:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta).

    Args:
        gate: [..., F] float.
        up: [..., F] of the same dtype.
        beta: Bound of the gate branch.
        linear_beta: Bound of the up branch; None leaves it linear.

    Returns:
        [..., F] in the dtype of `gate`, computed in float32 at least.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    bounded = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * bounded).to(gate.dtype)
