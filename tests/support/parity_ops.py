"""Parity cases of the ops: each returns rows of (case, what, max relative error, bound).

Used by the parity tests and by the report. The error of a tensor is max|a - e| / max|e|.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3ray.ops.attnres import attnres_mix
from k3ray.ops.kda import kda_chunkwise, kda_gate, kda_recurrent
from k3ray.ops.ragged import build_layout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fla says that it has no GPU here
    from fla.ops.attnres.naive import naive_attnres
    from fla.ops.kda.gate import naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

FP32_BOUND = 2e-6
"""Of float32 ops against a float64 reference."""

ORACLE_BOUND = 1e-5
"""Of float32 ops against a float32 oracle that runs a long recurrence."""

KDA_LENGTHS = (1, 3, 63, 64, 65, 200, 1000)
DECAYS = ("typical", "none", "strongest", "mixed")

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the report."""

    case: str
    what: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Within the bound (a NaN is not)."""
        return self.error <= self.bound


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max|a - e| / max|e|; the absolute error where the expected tensor is zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference, scale = float((actual - expected).abs().max()), float(expected.abs().max())
    error = difference / scale if scale > 0 else difference
    return math.inf if math.isnan(error) else error


def worst(actual: Tensors, expected: Tensors) -> float:
    """The largest of the tensors' errors."""
    return max(relative_error(a, e) for a, e in zip(actual, expected, strict=True))


def log_decays(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Log decays in (-5, 0): as trained, barely any, the strongest, or both ends at random."""
    match kind:
        case "typical":
            return -5.0 * torch.sigmoid(torch.randn(shape) * 2 - 3)
        case "none":
            return -torch.rand(shape) * 1e-6
        case "strongest":
            return -5.0 + torch.rand(shape) * 1e-3
        case _:
            ends = torch.where(torch.rand(shape) < 0.5, -4.9999, -1e-6)
            return torch.where(torch.rand(shape) < 0.2, -5.0 * torch.rand(shape), ends)


def kda_operands(
    tokens: int, kind: str, *, heads: int = 2, key_dim: int = 32, value_dim: int = 24
) -> list[torch.Tensor]:
    """q, k, v, g, beta as a layer makes them, float32."""
    unit = torch.nn.functional.normalize
    q = unit(torch.randn(tokens, heads, key_dim), dim=-1) * key_dim**-0.5
    k = unit(torch.randn(tokens, heads, key_dim), dim=-1)
    v = torch.randn(tokens, heads, value_dim)
    g = log_decays(kind, (tokens, heads, key_dim))
    return [q, k, v, g, torch.sigmoid(torch.randn(tokens, heads))]


def recurrence(operands: Tensors, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one document after another; output [T, H, V] and last states."""
    outputs, states = [], []
    for document in zip(*(torch.split(x, list(lengths)) for x in operands), strict=True):
        q, _, v = document[:3]
        state = q.new_zeros(1, q.shape[1], q.shape[2], v.shape[2])
        for token in zip(*(torch.split(x, 1) for x in document), strict=True):
            out, state = kda_recurrent(*token, state_SHKV=state)
            outputs.append(out)
        states.append(state)
    return torch.cat(outputs), torch.cat(states)


def kda_rows(lengths: Sequence[int], kind: str) -> list[Row]:
    """Chunkwise against the recurrence in float64 and against fla-core, with gradients."""
    torch.manual_seed(sum(lengths))
    tokens = sum(lengths)
    base = kda_operands(tokens, kind)
    borders = tuple(itertools.accumulate(lengths, initial=0))
    ours = [x.clone().requires_grad_() for x in base]
    out, state = kda_chunkwise(*ours, layout=build_layout(borders))
    dout, dstate = torch.randn_like(out), torch.randn_like(state)
    grads = torch.autograd.grad((out, state), ours, (dout, dstate))

    exact = [x.double().requires_grad_() for x in base]
    exact_out, exact_state = recurrence(exact, lengths)
    exact_grads = torch.autograd.grad(
        (exact_out, exact_state), exact, (dout.double(), dstate.double())
    )
    case = f"kda {'+'.join(map(str, lengths))} {kind}"
    rows = [
        Row(
            case=case,
            what="fp64 recurrence, forward",
            error=worst((out, state), (exact_out, exact_state)),
            bound=FP32_BOUND,
        ),
        Row(
            case=case,
            what="fp64 recurrence, gradients",
            error=_grad_error(grads, exact_grads, dout, dstate),
            bound=FP32_BOUND,
        ),
    ]
    if len(lengths) == 1:
        oracle = [x.clone()[None].requires_grad_() for x in base]
        fla_out, fla_state = naive_recurrent_kda(*oracle, scale=1.0, output_final_state=True)
        fla_grads = torch.autograd.grad(
            (fla_out, fla_state), oracle, (dout[None], dstate), allow_unused=True
        )
        rows += [
            Row(
                case=case,
                what="fla naive_recurrent_kda, forward",
                error=worst((out, state), (fla_out[0], fla_state)),
                bound=ORACLE_BOUND,
            ),
            Row(
                case=case,
                what="fla naive_recurrent_kda, gradients",
                error=_grad_error(grads, [x[0] for x in fla_grads], dout, dstate),
                bound=ORACLE_BOUND,
            ),
        ]
    return rows


def _grad_error(
    actual: Tensors, expected: Tensors, dout: torch.Tensor, dstate: torch.Tensor
) -> float:
    """Worst error of the five gradients.

    Where a gradient vanishes (that of g in a document of one token: nothing is there to decay), it
    is measured against the size of what was sent back.
    """
    sent = max(float(dout.abs().max()), float(dstate.abs().max()))
    errors = []
    for a, e in zip(actual, expected, strict=True):
        size = float(e.abs().max())
        scale = size if size > 1e-6 * sent else sent
        error = float((a.double() - e.double()).abs().max()) / scale
        errors.append(math.inf if math.isnan(error) else error)
    return max(errors)


def gate_rows() -> list[Row]:
    """The decay gate against fla-core's, with gradients; biases over the whole range."""
    torch.manual_seed(1)
    raw = (torch.randn(50, 3, 16) * 20).requires_grad_()
    a_log, bias = torch.randn(3, requires_grad=True), torch.randn(48, requires_grad=True)
    ours = kda_gate(raw + bias.view(3, 16), a_log, lower_bound=-5.0)
    oracle = naive_kda_lowerbound_gate(raw, a_log, bias, lower_bound=-5.0)
    sent = torch.randn_like(ours)
    inputs = (raw, a_log, bias)
    return [
        Row(
            case="kda gate",
            what="fla naive_kda_lowerbound_gate, forward",
            error=relative_error(ours, oracle),
            bound=FP32_BOUND,
        ),
        Row(
            case="kda gate",
            what="fla naive_kda_lowerbound_gate, gradients",
            error=worst(
                torch.autograd.grad(ours, inputs, sent),
                torch.autograd.grad(oracle, inputs, sent),
            ),
            bound=FP32_BOUND,
        ),
    ]


def attnres_rows(num_sources: int) -> list[Row]:
    """The AttnRes mix against fla-core's, with gradients."""
    torch.manual_seed(num_sources)
    sources = [torch.randn(37, 48, requires_grad=True) for _ in range(num_sources)]
    norm, query = torch.rand(48, requires_grad=True), torch.randn(48, requires_grad=True)
    ours = attnres_mix(sources, norm * query, eps=1e-5)
    oracle = naive_attnres(query, sources, norm, rms_eps=1e-5)
    sent = torch.randn_like(ours)
    inputs = (*sources, norm, query)
    case = f"attnres {num_sources} sources"
    mine = torch.autograd.grad(ours, inputs, sent, allow_unused=True)
    theirs = torch.autograd.grad(oracle, inputs, sent, allow_unused=True)
    # With one source the weights are constant: norm and query get rounding noise around zero.
    pairs = [(a, e) for a, e in zip(mine, theirs, strict=True) if float(e.abs().max()) > 1e-5]
    return [
        Row(
            case=case,
            what="fla naive_attnres, forward",
            error=relative_error(ours, oracle),
            bound=FP32_BOUND,
        ),
        Row(
            case=case,
            what="fla naive_attnres, gradients",
            error=worst([a for a, _ in pairs], [e for _, e in pairs]),
            bound=ORACLE_BOUND,
        ),
    ]
