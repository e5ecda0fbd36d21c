from __future__ import annotations

import pytest
import torch

from k3ray.ops.activation import sigmoid, silu, situ_glu, situ_glu_with_grads


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_glu_formula_and_gradients(linear_beta: float | None) -> None:
    gate = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    up = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    expected = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * bounded
    out = situ_glu(gate, up, beta=4.0, linear_beta=linear_beta)
    torch.testing.assert_close(out, expected)
    sent = torch.randn_like(out)
    again_out, *by_hand = situ_glu_with_grads(
        gate.detach(), up.detach(), sent, beta=4.0, linear_beta=linear_beta
    )
    assert torch.equal(again_out, out)
    for grad, again, want in zip(
        torch.autograd.grad(out, (gate, up), sent),
        by_hand,
        torch.autograd.grad(expected, (gate, up), sent),
        strict=True,
    ):
        torch.testing.assert_close(grad, want)
        torch.testing.assert_close(again, want)


def test_situ_glu_is_bounded_and_casts_back() -> None:
    huge = torch.full((4,), 1e4, dtype=torch.bfloat16)
    out = situ_glu(huge, huge, beta=4.0, linear_beta=25.0)
    assert out.dtype == torch.bfloat16
    assert float(out.max()) == 100.0


@pytest.mark.parametrize("op", [sigmoid, silu])
def test_exp_forms_are_finite_everywhere_with_their_gradients(op) -> None:
    x = torch.tensor([-1e4, -100.0, -88.8, -1.0, 0.0, 1.0, 100.0, 1e4], requires_grad=True)
    expected = {sigmoid: torch.sigmoid, silu: torch.nn.functional.silu}[op](x)
    torch.testing.assert_close(op(x), expected, rtol=1e-6, atol=1e-30)
    (grad,) = torch.autograd.grad(op(x).sum(), x)
    (want,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(grad, want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("op", [sigmoid, silu])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(op) -> None:
    x = torch.randn(37, 50)
    whole = op(x)
    assert all(torch.equal(op(x[:n].clone()), whole[:n]) for n in range(1, 37))
