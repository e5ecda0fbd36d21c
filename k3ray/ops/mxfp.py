"""MXFP4 and MXFP8: blocks of 32 values along the last dim that share one power-of-two scale.

One quantiser for training, export and serving. The scale of a block is 2^(floor(log2 amax) - emax)
(OCP Microscaling rule; emax 2 for E2M1, 8 for E4M3), stored as an E8M0 byte, exponent + 127.
Elements are rounded to nearest, ties to even, and saturate. A block of zeros has scale 1. MXFP4 is
packed as the release packs it: the low nibble is the even column, a nibble is sign << 3 | index
into {0, 0.5, 1, 1.5, 2, 3, 4, 6}.

Legend: I values of a row, B = I / 32 blocks. Source: architecture.md section 7.
"""

from __future__ import annotations

import functools

import torch

BLOCK = 32
"""Values that share a scale."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
NAN_SCALE = 255
"""The E8M0 byte that means NaN; never written, refused when read."""

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TIES_UP = (0.75, 1.75, 3.5)
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
"""Midpoints between grid values: at a tie the even index wins."""

_E2M1_EMAX, _E4M3_EMAX = 2, 8
_BIAS = 127


def mxfp4_quantize(
    x: torch.Tensor, scale_bytes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise and pack.

    Args:
        x: [..., I] finite float, I a multiple of 32.
        scale_bytes: [..., B] uint8 scales to use instead of the blocks' own: what was dequantised
            with them comes back byte for byte.

    Returns:
        (packed [..., I / 2] uint8, scales [..., B] uint8).

    Raises:
        ValueError: I is no multiple of 32, or a value is not finite.
    """
    blocks, own = _blocks(x, _E2M1_EMAX)
    scales = own if scale_bytes is None else scale_bytes
    units = blocks / _scale_values(scales, blocks)
    size = units.abs()
    codes = torch.zeros_like(units, dtype=torch.uint8)
    for tie in _TIES_UP:
        codes += size >= tie
    for tie in _TIES_DOWN:
        codes += size > tie
    codes |= torch.signbit(units).to(torch.uint8) << 3
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def mxfp4_dequantize(
    packed: torch.Tensor, scale_bytes: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Unpack and scale; exact in float32 and bfloat16.

    Args:
        packed: [..., I / 2] uint8.
        scale_bytes: [..., B] uint8.
        dtype: Of the result.

    Returns:
        [..., I].

    Raises:
        ValueError: the shapes do not belong together.
    """
    if packed.shape[:-1] != scale_bytes.shape[:-1] or packed.shape[-1] * 2 != (
        scale_bytes.shape[-1] * BLOCK
    ):
        raise ValueError(f"packed {tuple(packed.shape)} against scales {tuple(scale_bytes.shape)}")
    grid = torch.tensor([*_GRID, *(-v for v in _GRID)], device=packed.device)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return _scaled(grid[nibbles.long()], scale_bytes).to(dtype)


def mxfp4_round(x: torch.Tensor) -> torch.Tensor:
    """What is left of x [..., I] after MXFP4; exact to quantise again, byte for byte.

    Raises:
        ValueError: as `mxfp4_quantize`.
    """
    return mxfp4_dequantize(*mxfp4_quantize(x), dtype=x.dtype)


def mxfp8_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to E4M3.

    Args:
        x: [..., I] finite float, I a multiple of 32.

    Returns:
        (elements [..., I] float8_e4m3fn, scales [..., B] uint8).

    Raises:
        ValueError: I is no multiple of 32, or a value is not finite.
    """
    blocks, scales = _blocks(x, _E4M3_EMAX)
    units = (blocks / _scale_values(scales, blocks)).clamp(-E4M3_MAX, E4M3_MAX)
    return units.flatten(-2).to(torch.float8_e4m3fn), scales


def mxfp8_dequantize(
    elements: torch.Tensor, scale_bytes: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Scale; exact in float32 and bfloat16.

    Args:
        elements: [..., I] float8_e4m3fn.
        scale_bytes: [..., B] uint8.
        dtype: Of the result.

    Returns:
        [..., I].

    Raises:
        ValueError: the shapes do not belong together.
    """
    if elements.shape != (*scale_bytes.shape[:-1], scale_bytes.shape[-1] * BLOCK):
        raise ValueError(
            f"elements {tuple(elements.shape)} against scales {tuple(scale_bytes.shape)}"
        )
    return _scaled(elements.float(), scale_bytes).to(dtype)


def _blocks(x: torch.Tensor, emax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 [..., B, 32], E8M0 bytes [..., B]) of the blocks' own scales."""
    if not x.shape or x.shape[-1] % BLOCK:
        raise ValueError(f"the last dim of {tuple(x.shape)} is no multiple of {BLOCK}")
    blocks = x.float().unflatten(-1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    amax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("a value is not finite")
    # amax = mantissa * 2^exponent with a mantissa in [0.5, 1), exact for denormals, too.
    exponent = torch.frexp(amax).exponent - 1 - emax
    scales = (exponent + _BIAS).clamp(0, NAN_SCALE - 1)
    return blocks, torch.where(amax > 0, scales, _BIAS).to(torch.uint8)


def _scaled(units: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """[..., I] units times their blocks' scales."""
    blocks = units.view(*scale_bytes.shape, BLOCK)
    return (blocks * _scale_values(scale_bytes, blocks)).view(units.shape)


def _scale_values(scale_bytes: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[..., B, 1] float32 scales; a byte of 255 is NaN."""
    return _scale_table(like.device)[scale_bytes.long()].unsqueeze(-1)


@functools.lru_cache(maxsize=16)
def _scale_table(device: torch.device) -> torch.Tensor:
    """[256] float32 value of each E8M0 byte."""
    with torch.inference_mode(mode=False):
        exponents = torch.arange(256, dtype=torch.float64) - _BIAS
        table = torch.exp2(exponents).float()  # exact: 2^-127 is a denormal, 2^127 fits
        table[NAN_SCALE] = torch.nan
        return table.to(device)
