"""SiTU-GLU's kernel against its reference, under Triton's interpreter; and compiled for sm_90."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from k3ray.ops.activation import situ_glu as door
from k3ray.ops.activation import situ_glu_with_grads as door_with_grads
from kernels.situ_glu import situ_glu, situ_glu_grads
from kernels.situ_glu.reference import situ_glu_reference

SHAPES = [(1, 1), (3, 31), (5, 1024), (2, 1025), (7, 2047), (2, 3, 5), (4,), (0, 8), (3, 0)]
BOUNDS = [(4.0, 25.0), (4.0, None), (0.5, 1.0)]


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "this tier runs under the interpreter"


def operands(shape: tuple[int, ...], scale: float = 3.0) -> list[torch.Tensor]:
    torch.manual_seed(sum(shape))
    return [torch.randn(shape) * scale for _ in range(3)]


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error relative to the value, or to a thousandth of the largest value where the two
    terms of a gradient cancel."""
    if not found.numel():
        return 0.0
    wide = expected.double()
    size = wide.abs().clamp_min(1e-3 * float(wide.abs().max()) + 1e-12)
    return float(((found.double() - wide).abs() / size).max())


def exact(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, beta: float, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference and its gradients in float64."""
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    out = situ_glu_reference(g, u, beta=beta, linear_beta=linear_beta)
    out.backward(grad.double())
    assert g.grad is not None
    assert u.grad is not None
    return out.detach(), g.grad, u.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_forward_and_gradients(shape: tuple[int, ...], bounds: tuple[float, float | None]) -> None:
    gate, up, grad = operands(shape)
    beta, linear_beta = bounds
    expected = exact(gate, up, grad, beta, linear_beta)
    g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
    out = situ_glu(g, u, beta=beta, linear_beta=linear_beta)
    out.backward(grad)
    for found, right in zip((out, g.grad, u.grad), expected, strict=True):
        assert found is not None
        assert found.shape == gate.shape
        assert worst(found.detach(), right) < 2e-5
    direct = situ_glu_grads(gate, up, grad, beta=beta, linear_beta=linear_beta)
    assert torch.equal(direct[0], g.grad)
    assert torch.equal(direct[1], u.grad)


def test_extreme_and_tiny_inputs() -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, 1e-4, 0.2499, 0.2501, 1.0, 20.0, 88.0, 1e4, 1e30])
    line = torch.cat([values, -values])
    gate, up = (each.flatten() for each in torch.meshgrid(line, line, indexing="ij"))
    out = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    right = situ_glu_reference(gate.double(), up.double(), beta=4.0, linear_beta=25.0)
    assert torch.isfinite(out).all()
    relative = (out.double() - right).abs() / right.abs().clamp_min(1e-37)
    assert float(relative[right.abs() > 1e-37].max()) < 2e-6
    grads = situ_glu_grads(gate, up, torch.ones_like(gate), beta=4.0, linear_beta=25.0)
    assert all(torch.isfinite(each).all() for each in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    gate, up, grad = (each.to(dtype) for each in operands((5, 333)))
    expected = exact(gate, up, grad, 4.0, 25.0)
    found = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    grads = situ_glu_grads(gate, up, grad, beta=4.0, linear_beta=25.0)
    one_ulp = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-10
    for each, right in zip((found, *grads), expected, strict=True):
        assert each.dtype is dtype
        assert worst(each, right) <= one_ulp


def test_halves_of_a_fused_product_and_a_transposed_operand() -> None:
    fused_NF = torch.randn(6, 70)
    gate, up = fused_NF[:, :35], fused_NF[:, 35:]
    expected = situ_glu(gate.contiguous(), up.contiguous(), beta=4.0, linear_beta=25.0)
    assert torch.equal(situ_glu(gate, up, beta=4.0, linear_beta=25.0), expected)
    turned = up.contiguous().t().contiguous().t()
    assert turned.stride(1) != 1
    assert torch.equal(situ_glu(gate, turned, beta=4.0, linear_beta=25.0), expected)


def test_bits_of_an_element_do_not_depend_on_its_place() -> None:
    gate, up = torch.randn(9, 1500), torch.randn(9, 1500)
    whole = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    part = situ_glu(gate[4:7, 1001:1400], up[4:7, 1001:1400], beta=4.0, linear_beta=25.0)
    assert torch.equal(part, whole[4:7, 1001:1400])


def test_every_output_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        return empty(*args, **options).fill_(float("nan"))  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: poisoned(x.shape, dtype=x.dtype))
    gate, up, grad = operands((3, 1027))
    assert torch.isfinite(situ_glu(gate, up, beta=4.0, linear_beta=25.0)).all()
    grads = situ_glu_grads(gate, up, grad, beta=4.0, linear_beta=25.0)
    assert all(torch.isfinite(each).all() for each in grads)


def test_what_does_not_fit_is_refused() -> None:
    gate = torch.randn(2, 4)
    for up in (torch.randn(4, 2), torch.randn(2, 4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="must agree"):
            situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    with pytest.raises(ValueError, match="is not one of"):
        situ_glu(gate.double(), gate.double(), beta=4.0, linear_beta=25.0)
    for bounds in ({"beta": 0.0, "linear_beta": 1.0}, {"beta": 1.0, "linear_beta": -1.0}):
        with pytest.raises(ValueError, match="positive"):
            situ_glu(gate, gate, **bounds)


def test_the_door_leads_to_the_kernel() -> None:
    gate, up, grad = operands((3, 65))
    kernel = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
    assert torch.equal(door(gate, up, beta=4.0, linear_beta=25.0), kernel)
    wide = door(gate.double(), up.double(), beta=4.0, linear_beta=25.0)
    assert wide.dtype is torch.float64, "kernels know no float64: the plain op answers"
    found = door_with_grads(gate, up, grad, beta=4.0, linear_beta=25.0)
    expected = (kernel, *situ_glu_grads(gate, up, grad, beta=4.0, linear_beta=25.0))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.situ_glu import op
from kernels.runtime import launch_size
import torch

launch = launch_size("situ_glu", torch.device("cpu"))
numbers = {"width": "i32", "gate_stride": "i32", "up_stride": "i32", "beta": "fp32",
           "linear_beta": "fp32"}
for dtype in ("fp32", "bf16", "fp16"):
    for kernel, pointers in (
        (op.situ_glu_forward, ("gate_ptr", "up_ptr", "out_ptr")),
        (op.situ_glu_backward, ("gate_ptr", "up_ptr", "grad_ptr", "grad_gate_ptr", "grad_up_ptr")),
    ):
        fixed = {"BOUNDED": True, "BLOCK": launch.block}
        signature = {**{name: "*" + dtype for name in pointers}, **numbers,
                     **dict.fromkeys(fixed, "constexpr")}
        source = ASTSource(kernel, signature, constexprs=fixed)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.num_warps}
        )
        assert ".target sm_90" in compiled.asm["ptx"], compiled.asm["ptx"][:200]
        assert len(compiled.asm["cubin"]) > 1000
        print(kernel.__name__, dtype, len(compiled.asm["cubin"]))
"""


def test_compiles_for_sm_90_without_a_gpu() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 6
