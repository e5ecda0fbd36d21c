from __future__ import annotations

import torch

from k3ray.ops.linear import row_linear
from k3ray.ops.routing import combine, route


def test_bias_moves_the_selection_but_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    ids, weights = route(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), top_k=2, scaling=2.0)
    assert ids.tolist() == [[0, 3]]
    scores = torch.sigmoid(torch.tensor([3.0, 0.0]))
    torch.testing.assert_close(weights[0], 2.0 * scores / scores.sum())


def test_ids_ascend_and_weights_follow_them() -> None:
    logits = torch.randn(20, 12)
    ids, weights = route(logits, torch.zeros(12), top_k=4)
    assert (ids.diff(dim=1) > 0).all()
    scores = torch.sigmoid(logits).gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))


def test_combine_is_the_weighted_sum_with_gradients() -> None:
    rows = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(combine(rows, weights), torch.einsum("tkl,tk->tl", rows, weights))
    assert torch.autograd.gradcheck(combine, (rows, weights))


def test_linear_rows_have_the_same_bits_at_any_row_count() -> None:
    x, weight = torch.randn(40, 64), torch.randn(24, 64)
    whole = row_linear(x, weight)
    assert all(torch.equal(row_linear(x[:n].clone(), weight), whole[:n]) for n in range(1, 40))
