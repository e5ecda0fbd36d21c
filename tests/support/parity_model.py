"""Parity cases of the whole model, on `k3-tiny` with weights large enough that every part matters.

Each returns rows of (case, what, max relative error, bound). Used by the tests and the report.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from k3ray.config.numeric import NumericMode
from k3ray.config.presets import PRESETS
from k3ray.model.batch import PackedBatch
from k3ray.model.init import init_dense
from k3ray.model.k3 import K3Model
from k3ray.model.mla_layer import MlaAttention
from k3ray.model.reference import reference_logits
from k3ray.model.serve_state import SeqSpan, ServeState
from k3ray.model.serve_step import build_step
from k3ray.ops.ragged import build_layout
from tests.support.local_experts import PlainExperts
from tests.support.parity_ops import Row, relative_error

CFG = PRESETS["k3-tiny"].text_config

BOUNDS = {torch.float64: 1e-11, torch.float32: 5e-5}
"""Of five layers, forward and gradients, each in its own dtype, against float64."""

PATH_BOUND = 2e-5
"""Of two float32 ways of computing the same logits."""

PACKED_LENGTHS = (1, 2, 63, 64, 65)


def make_model(
    dtype: torch.dtype = torch.float32,
    *,
    checkpointed: bool = False,
    numeric: NumericMode = NumericMode.DETERMINISTIC,
) -> tuple[K3Model, PlainExperts]:
    """A model whose norms, biases and pseudo-queries are all away from their initial values."""
    model = K3Model(CFG, checkpoint_activations=checkpointed, dtype=dtype, numeric=numeric)
    init_dense(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.add_(noise.to(dtype) * 0.05)
    experts = PlainExperts(CFG, 0, dtype=dtype)
    return model, experts


def make_tokens(num_tokens: int, seed: int = 2) -> torch.Tensor:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CFG.vocab_size, (num_tokens,), generator=generator)


def pack(lengths: Sequence[int], tokens_T: torch.Tensor) -> PackedBatch:
    """Documents of the given lengths."""
    return PackedBatch(
        tokens_T=tokens_T, cu_seqlens=tuple(itertools.accumulate(lengths, initial=0))
    )


def run_with_grads(
    model: K3Model, experts: PlainExperts, batch: PackedBatch, sent_TV: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and gradients by name of everything that got one."""
    named = {**dict(model.named_parameters()), **experts.weights}
    for parameter in named.values():
        parameter.grad = None
    logits_TV = model.logits(model.forward_hidden(batch, experts))
    torch.autograd.backward(logits_TV, sent_TV.to(logits_TV.dtype))
    grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
    return logits_TV.detach(), grads


def worst_named(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The worst error and its tensor; both must have the same names."""
    if actual.keys() != expected.keys():
        return float("inf"), f"names differ: {sorted(actual.keys() ^ expected.keys())[:4]}"
    return max((relative_error(actual[name], expected[name]), name) for name in expected)


def reference_rows(
    dtype: torch.dtype, num_tokens: int = 100, *, numeric: NumericMode = NumericMode.DETERMINISTIC
) -> list[Row]:
    """The whole model against `reference.py` in float64: logits and every gradient."""
    model, experts = make_model(dtype, numeric=numeric)
    tokens_T = make_tokens(num_tokens)
    exact = {
        name: tensor.detach().double().requires_grad_()
        for name, tensor in {**model.state_dict(), **experts.weights}.items()
    }
    exact_TV = reference_logits(CFG, exact, tokens_T)
    sent_TV = torch.randn(exact_TV.shape, generator=torch.Generator().manual_seed(3))
    torch.autograd.backward(exact_TV, sent_TV.double())
    exact_grads = {n: p.grad for n, p in exact.items() if p.grad is not None}
    logits_TV, grads = run_with_grads(model, experts, pack((num_tokens,), tokens_T), sent_TV)
    error, name = worst_named(grads, exact_grads)
    case, bound = f"model {numeric} {str(dtype).removeprefix('torch.')}", BOUNDS[dtype]
    return [
        Row(
            case=case,
            what="reference.py, logits",
            error=relative_error(logits_TV, exact_TV),
            bound=bound,
        ),
        Row(
            case=case,
            what=f"reference.py, gradients (worst {_short(name)})",
            error=error,
            bound=bound,
        ),
    ]


def split_rows(
    num_tokens: int = 67, *, numeric: NumericMode = NumericMode.DETERMINISTIC
) -> list[Row]:
    """Prefill, three single steps and a second prefill against the full forward, at every split.

    The plain experts of this file do not pad their rows; test_determinism compares bits.
    """
    model, experts = make_model(numeric=numeric)
    tokens_T = make_tokens(num_tokens)
    full_TV = model.logits(model.forward_hidden(pack((num_tokens,), tokens_T), experts)).detach()
    errors = {}
    for split in range(1, num_tokens):
        singles = [1] * min(3, num_tokens - split)
        rest = num_tokens - split - len(singles)
        served_TV = serve_in_spans(
            model, experts, tokens_T, [split, *singles, *([rest] * (rest > 0))], numeric
        )
        errors[split] = relative_error(served_TV, full_TV)
    decoded_TV = serve_in_spans(model, experts, tokens_T, [1] * num_tokens, numeric)
    split, error = max(errors.items(), key=lambda item: item[1])
    return [
        Row(
            case=f"serve {num_tokens} tokens {numeric}",
            what=f"full forward, every split (worst {split})",
            error=error,
            bound=PATH_BOUND,
        ),
        Row(
            case=f"serve {num_tokens} tokens {numeric}",
            what="full forward, decoded one by one",
            error=relative_error(decoded_TV, full_TV),
            bound=PATH_BOUND,
        ),
    ]


def serve_in_spans(
    model: K3Model,
    experts: PlainExperts,
    tokens_T: torch.Tensor,
    lengths: Sequence[int],
    numeric: NumericMode,
) -> torch.Tensor:
    """Logits of every token of one sequence, served span after span on shuffled pages."""
    dtype = model.lm_head.weight.dtype
    state = ServeState(CFG, num_slots=3, num_pages=7, dtype=dtype, numeric=numeric)
    pages, start, parts = (5, 2, 6, 0, 3), 0, []
    for length in lengths:
        span = SeqSpan(
            slot=1, pages=pages[: -(-(start + length) // 64)], start=start, length=length
        )
        part = tokens_T[start : start + length]
        parts.append(model.forward_serve(part, [span], state, experts, all_rows=True))
        start += length
    return torch.cat(parts)


def mla_rows(dtype: torch.dtype, num_tokens: int = 150) -> list[Row]:
    """One MLA layer, absorbed over pages (in two spans, both modes) against expanded."""
    model, _ = make_model(dtype, numeric=NumericMode.FAST)
    layer = next(m for m in model.modules() if isinstance(m, MlaAttention))
    generator = torch.Generator().manual_seed(4)
    x_TX = torch.randn(num_tokens, CFG.hidden_size, generator=generator).to(dtype)
    expanded_TX = layer(x_TX, build_layout((0, num_tokens)))
    rows = []
    for numeric in NumericMode:
        state = ServeState(CFG, num_slots=1, num_pages=4, dtype=dtype, numeric=numeric)
        parts = []
        for start, stop in ((0, 70), (70, num_tokens)):
            span = SeqSpan(slot=0, pages=(2, 0, 3), start=start, length=stop - start)
            step = build_step([span], state, num_tokens=stop - start)
            with torch.no_grad():
                parts.append(layer.serve(x_TX[start:stop], step))
        rows.append(
            Row(
                case=f"mla {numeric} {str(dtype).removeprefix('torch.')}",
                what="absorbed against expanded",
                error=relative_error(torch.cat(parts), expanded_TX),
                bound=BOUNDS[dtype],
            )
        )
    return rows


def packed_rows(lengths: Sequence[int] = PACKED_LENGTHS) -> list[Row]:
    """One packed batch against its documents one by one: logits and summed gradients."""
    model, experts = make_model()
    tokens_T = make_tokens(sum(lengths))
    sent_TV = torch.randn(sum(lengths), CFG.vocab_size, generator=torch.Generator().manual_seed(5))
    packed_TV, packed = run_with_grads(model, experts, pack(lengths, tokens_T), sent_TV)
    alone, summed = [], dict[str, torch.Tensor]()
    for doc, sent in zip(
        torch.split(tokens_T, list(lengths)), torch.split(sent_TV, list(lengths)), strict=True
    ):
        logits_TV, grads = run_with_grads(model, experts, pack((len(doc),), doc), sent)
        alone.append(logits_TV)
        for name, grad in grads.items():
            summed[name] = summed[name] + grad if name in summed else grad
    error, name = worst_named(packed, summed)
    case = f"packed {'+'.join(map(str, lengths))}"
    return [
        Row(
            case=case,
            what="separate documents, logits",
            error=relative_error(packed_TV, torch.cat(alone)),
            bound=PATH_BOUND,
        ),
        Row(
            case=case,
            what=f"separate documents, gradients (worst {_short(name)})",
            error=error,
            bound=PATH_BOUND,
        ),
    ]


def checkpointed_rows() -> list[Row]:
    """Activation checkpointing changes no bit."""
    batch = pack((65, 40), make_tokens(105))
    sent_TV = torch.randn(105, CFG.vocab_size, generator=torch.Generator().manual_seed(6))
    plain_TV, plain = run_with_grads(*make_model(), batch, sent_TV)
    again_TV, again = run_with_grads(*make_model(checkpointed=True), batch, sent_TV)
    error, name = worst_named(again, plain)
    return [
        Row(
            case="checkpointed",
            what="kept activations, logits",
            error=relative_error(again_TV, plain_TV),
            bound=0.0,
        ),
        Row(
            case="checkpointed",
            what=f"kept activations, gradients (worst {_short(name)})",
            error=error,
            bound=0.0,
        ),
    ]


def _short(name: str) -> str:
    return name.removeprefix("model.").removesuffix(".weight")
