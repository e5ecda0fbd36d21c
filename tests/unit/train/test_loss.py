"""The loss in pieces: value and gradients of the plain cross entropy of all logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from k3ray.train.loss import IGNORED, PIECE_ROWS, head_loss_sum

VOCAB, WIDTH = 37, 12


def operands(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, dtype=dtype) * 3
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype)
    targets = torch.randint(0, VOCAB, (rows,))
    targets[::3] = IGNORED
    return hidden, weight, targets


@pytest.mark.parametrize(
    "rows", [1, 2, 15, 16, 17, PIECE_ROWS - 1, PIECE_ROWS, PIECE_ROWS + 1, 3 * PIECE_ROWS + 5]
)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_value_and_gradients(rows: int, dtype: torch.dtype, rtol: float) -> None:
    hidden, weight, targets = operands(rows, dtype)
    one = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    other = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    found = head_loss_sum(one[0], one[1], targets)
    expected = cross_entropy(other[0] @ other[1].T, targets, ignore_index=IGNORED, reduction="sum")
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol)
    (found * 0.25).backward()
    (expected * 0.25).backward()
    for mine, right in zip(one, other, strict=True):
        assert mine.grad is not None
        assert right.grad is not None
        scale = float(right.grad.abs().max()) + 1e-30
        assert float((mine.grad.double() - right.grad).abs().max()) <= rtol * scale
    with torch.no_grad():
        assert torch.equal(head_loss_sum(hidden, weight, targets), found)


def test_large_logits_and_rows_without_loss() -> None:
    hidden = torch.full((3, WIDTH), 1e4, requires_grad=True)
    weight = torch.eye(VOCAB, WIDTH).requires_grad_()
    nothing = torch.full((3,), IGNORED)
    loss = head_loss_sum(hidden, weight, nothing)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()
    loss = head_loss_sum(hidden, weight, torch.tensor([0, WIDTH, IGNORED]))
    assert torch.isfinite(loss)
    assert float(loss.detach()) > 1e4


def test_half_precision_gives_its_own_dtype_back() -> None:
    hidden, weight, targets = operands(40, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    head_loss_sum(hidden, weight, targets).backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype is torch.bfloat16
