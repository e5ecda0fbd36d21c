"""Bias-free linear maps whose row bits do not depend on how many rows there are.

Legend: T rows, I inputs, O outputs, B matrices of a batch.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

ROW_TILE = 16
"""Rows of every product are padded with zeros to a multiple of this (design, section 5)."""


def row_linear(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """x @ weight.T.

    Args:
        x: [T, I] float.
        weight_OI: [O, I] of the same dtype.

    Returns:
        [T, O].
    """
    rows = x.shape[0]
    missing = -rows % ROW_TILE
    if missing == 0:
        return functional.linear(x, weight_OI)
    padded = torch.cat((x, _zero_rows(x.shape[1], x.dtype, x.device)[:missing]))
    return functional.linear(padded, weight_OI)[:rows]


def row_bmm(x_BTI: torch.Tensor, weight_BIO: torch.Tensor) -> torch.Tensor:
    """x @ weight for each of B pairs.

    Args:
        x_BTI: [B, T, I] float.
        weight_BIO: [B, I, O] of the same dtype.

    Returns:
        [B, T, O].
    """
    rows = x_BTI.shape[1]
    missing = -rows % ROW_TILE
    if missing == 0:
        return torch.bmm(x_BTI, weight_BIO)
    return torch.bmm(functional.pad(x_BTI, (0, 0, 0, missing)), weight_BIO)[:, :rows]


@functools.lru_cache(maxsize=64)
def _zero_rows(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows to pad with, [15, width]: joining them costs a fifth of what padding does."""
    with torch.inference_mode(mode=False):
        return torch.zeros(ROW_TILE - 1, width, dtype=dtype, device=device)
