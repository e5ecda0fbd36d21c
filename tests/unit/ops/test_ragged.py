from __future__ import annotations

import itertools

import pytest
import torch

from k3ray.ops.ragged import build_layout
from k3ray.ops.short_conv import conv_tail, short_conv


def slow_conv(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    taps = weight.shape[1] - 1
    before = x.new_zeros(taps, x.shape[1]) if state is None else state
    padded = torch.cat((before, x))
    return torch.stack([(padded[t : t + taps + 1] * weight.T).sum(0) for t in range(len(x))])


def test_chunks_are_ordered_by_index_then_longest_document() -> None:
    layout = build_layout((0, 3, 203, 267))
    assert layout.num_active == (3, 1, 1, 1)
    assert layout.num_chunks == 6
    assert layout.rank_D.tolist() == [1, 0, 2]
    assert layout.chunk_rows_T[0] == 64  # first document, second in rank
    assert layout.chunk_rows_T[3 + 64] == 3 * 64  # second chunk of the longest
    assert len(set(layout.chunk_rows_T.tolist())) == 267


@pytest.mark.parametrize("borders", [(0,), (1, 2), (0, 0, 3), (0, 4, 2)])
def test_borders_must_rise_from_zero(borders: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rise strictly"):
        build_layout(borders)


@pytest.mark.parametrize("lengths", [(1,), (2, 1, 5), (3, 3), (4, 1, 1, 7)])
@pytest.mark.parametrize("with_state", [False, True])
def test_short_conv_of_ragged_documents(lengths: tuple[int, ...], with_state: bool) -> None:
    borders = [0]
    for length in lengths:
        borders.append(borders[-1] + length)
    layout = build_layout(tuple(borders))
    x = torch.randn(borders[-1], 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    state = torch.randn(len(lengths), 3, 6, dtype=torch.float64) if with_state else None
    ours = short_conv(x, weight, layout=layout, state_DWC=state)
    want = torch.cat(
        [
            slow_conv(x[a:b], weight, None if state is None else state[d])
            for d, (a, b) in enumerate(itertools.pairwise(borders))
        ]
    )
    torch.testing.assert_close(ours, want)
    sent = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (x, weight), sent),
        torch.autograd.grad(want, (x, weight), sent),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("split", range(1, 9))
def test_conv_state_carries_over_any_split(split: int) -> None:
    x, weight = torch.randn(9, 5), torch.randn(5, 4)
    whole = short_conv(x, weight, layout=build_layout((0, 9)))
    left = build_layout((0, split))
    first = short_conv(x[:split], weight, layout=left)
    state = conv_tail(x[:split], layout=left, state_DWC=None)
    right = build_layout((0, 9 - split))
    second = short_conv(x[split:], weight, layout=right, state_DWC=state)
    torch.testing.assert_close(torch.cat((first, second)), whole)
    tail = conv_tail(x[split:], layout=right, state_DWC=state)
    assert torch.equal(tail[0], x[-3:])


def test_short_conv_refuses_another_kernel_size() -> None:
    with pytest.raises(ValueError, match="taps"):
        short_conv(torch.zeros(2, 3), torch.zeros(3, 5), layout=build_layout((0, 2)))
