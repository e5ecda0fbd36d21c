from __future__ import annotations

import torch

from k3ray.ops.norm import l2_norm, rms_norm


def test_rms_norm_equals_torch_with_gradients() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    ours = rms_norm(x, weight, eps=1e-5)
    want = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(ours, want)
    sent = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (x, weight), sent),
        torch.autograd.grad(want, (x, weight), sent),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_l2_norm_scales_and_keeps_eps_inside_the_root() -> None:
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: l2_norm(y, scale=0.3), (x,))
    small = torch.full((1, 4), 1e-4)
    expected = 0.5 * small / (small.square().sum() + 1e-6).sqrt()
    torch.testing.assert_close(l2_norm(small, scale=0.5), expected)
    assert torch.equal(l2_norm(torch.zeros(1, 4)), torch.zeros(1, 4))
