"""MXFP4 and MXFP8 against their definition: grid points, ties, all codes, scale extremes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.ops.mxfp import (
    BLOCK,
    NAN_SCALE,
    mxfp4_dequantize,
    mxfp4_quantize,
    mxfp8_dequantize,
    mxfp8_quantize,
)

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def block(values: list[float], top: float = 4.0) -> torch.Tensor:
    """A block whose own scale is 1 (top in [4, 8))."""
    return torch.tensor([*values, *([0.0] * (BLOCK - 1 - len(values))), top])


def test_grid_points_are_exact_and_packed_low_nibble_first() -> None:
    values = [sign * v for v in GRID for sign in (1.0, -1.0)]
    packed, scales = mxfp4_quantize(block(values))
    assert scales.tolist() == [127]
    assert packed[:8].tolist() == [(index | 8) << 4 | index for index in range(8)]
    again = mxfp4_dequantize(packed, scales)
    assert torch.equal(again, block(values))
    assert torch.equal(torch.signbit(again[:16]), torch.signbit(block(values)[:16]))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0),
        (0.2500001, 0.5), (0.7499999, 0.5), (1.2500001, 1.5), (2.4999998, 2.0), (5.0000005, 6.0),
        (6.9, 6.0), (7.999, 6.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_even_and_large_values_saturate(
    value: float, rounded: float, sign: float
) -> None:
    again = mxfp4_dequantize(*mxfp4_quantize(block([sign * value])))
    assert again[0].item() == sign * rounded


def test_all_codes_at_all_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:16].repeat(256, 1)
    for byte in range(NAN_SCALE):
        scales = torch.full((256, 1), byte, dtype=torch.uint8)
        values = mxfp4_dequantize(codes, scales)
        nibbles = np.stack((codes[0].numpy() & 15, codes[0].numpy() >> 4), -1).reshape(-1)
        table = np.array([*GRID, *(-v for v in GRID)])
        with np.errstate(over="ignore"):
            exact = (table[nibbles] * 2.0 ** (byte - 127)).astype(np.float32)
        assert np.array_equal(values[0].numpy(), exact)
        if byte <= 252:  # finite
            half = mxfp4_dequantize(codes, scales, dtype=torch.bfloat16)
            assert torch.equal(half.float(), values)
            packed, same = mxfp4_quantize(values, scales)
            assert torch.equal(same, scales)
            assert torch.equal(packed, codes)
    assert mxfp4_dequantize(codes, torch.full((256, 1), 255, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (1.0, 125), (1.9999999, 125), (2.0, 126), (4.0, 127), (7.9999995, 127), (8.0, 128),
        (3.4028234663852886e38, 252), (1.1754943508222875e-38, 0), (1.401298464324817e-45, 0),
    ],
)  # fmt: skip
def test_the_scale_is_the_floor_of_the_exponent(amax: float, byte: int) -> None:
    values = torch.zeros(BLOCK)
    values[7] = -amax
    packed, scales = mxfp4_quantize(values)
    assert scales.tolist() == [byte]
    again = mxfp4_dequantize(packed, scales)
    assert torch.isfinite(again).all()
    if byte:
        assert abs(again[7].item() / -amax - 1.0) <= 0.25


def test_blocks_of_zeros() -> None:
    packed, scales = mxfp4_quantize(torch.zeros(2, 64))
    assert scales.unique().tolist() == [127]
    assert packed.unique().tolist() == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    values = torch.zeros(64)
    values[33] = bad
    for quantize in (mxfp4_quantize, mxfp8_quantize):
        with pytest.raises(ValueError, match="finite"):
            quantize(values)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4_quantize(torch.zeros(3, 33))
    packed, scales = mxfp4_quantize(torch.zeros(3, 64))
    with pytest.raises(ValueError, match="against scales"):
        mxfp4_dequantize(packed, scales[:, :1])
    elements, scales = mxfp8_quantize(torch.zeros(3, 64))
    with pytest.raises(ValueError, match="against scales"):
        mxfp8_dequantize(elements, scales[:2])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), exponent=st.integers(-120, 110), rows=st.integers(1, 5),
    blocks=st.integers(1, 4),
)  # fmt: skip
def test_against_an_independent_definition(
    seed: int, exponent: int, rows: int, blocks: int
) -> None:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((rows, blocks * BLOCK)) * 2.0**exponent
    values *= 2.0 ** generator.integers(-4, 4, (rows, 1))
    x = values.astype(np.float32)
    by_block = x.reshape(rows, blocks, BLOCK).astype(np.float64)
    amax = np.abs(by_block).max(-1)
    e = np.clip(np.floor(np.log2(amax)) - 2, -127, 127)
    unit = by_block / 2.0 ** e[..., None]
    fp4 = np.clip(unit, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    want = (fp4 * 2.0 ** e[..., None]).reshape(x.shape).astype(np.float32)
    packed, scales = mxfp4_quantize(torch.from_numpy(x))
    assert np.array_equal(scales.numpy(), (e + 127).astype(np.uint8))
    assert np.array_equal(mxfp4_dequantize(packed, scales).numpy(), want)
    e8 = np.clip(np.floor(np.log2(amax)) - 8, -127, 127)
    fp8 = np.clip(by_block / 2.0 ** e8[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    want8 = (fp8.astype(np.float64) * 2.0 ** e8[..., None]).reshape(x.shape).astype(np.float32)
    elements, scales8 = mxfp8_quantize(torch.from_numpy(x))
    assert np.array_equal(mxfp8_dequantize(elements, scales8).numpy(), want8)


def test_requantising_what_was_dequantised_changes_no_value() -> None:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    once = mxfp4_dequantize(*mxfp4_quantize(x))
    assert torch.equal(mxfp4_dequantize(*mxfp4_quantize(once)), once)
