"""Choosing tokens: counter-based noise, filters, log-probabilities.

A token depends on its logits row, the parameters, the tokens generated so far and the noise of
(seed, choice, position); never on batch mates or on how often sampling ran before. Maths is fp64
in ascending token id; equal logits are ordered by lowest id. Legend: V vocabulary.
Entry point: `sample`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3ray.engine.request import SamplingParams
from k3ray.errors import BadRequestError
from k3ray.ops.logprobs import exponentials

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

MAX_LOGPROBS = 20
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A chosen token with its fp32 log-probability, and the most likely ones."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


def noise(*, seed: int, choice: int, position: int) -> float:
    """The uniform in [0, 1) of one position: Philox4x64 keyed by (seed, choice), counter =
    position, first output, its upper 53 bits.

    Source: Salmon et al. 2011, as in numpy.random.Philox (which steps the counter first).
    """
    key = np.array([seed & _MASK_64, choice], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53


def sample(
    logits_V: npt.NDArray[np.float32],
    params: SamplingParams,
    *,
    uniform: float,
    counts: Mapping[int, int],
) -> Sampled:
    """Choose one token.

    Args:
        logits_V: [V] float32, finite.
        params: How to choose; penalties and bias, then temperature, top-k, top-p, min-p.
        uniform: The position's noise; unused when greedy.
        counts: How often each token was generated so far.

    Returns:
        The token; log-probabilities are those of the unmodified logits.
    """
    raw_V = logits_V.astype(np.float64)
    weights_V, log_total_scalar = exponentials(raw_V)
    log_total = float(log_total_scalar)
    changed = bool(params.logit_bias) or bool(
        counts and (params.presence_penalty or params.frequency_penalty)
    )
    logits = _penalised(raw_V, params, counts) if changed else raw_V
    if params.temperature == 0.0:
        token = int(logits.argmax())
    else:
        if changed or params.temperature != 1.0:
            with np.errstate(over="ignore"):
                weights_V = np.exp((logits - logits.max()) / params.temperature)
        token = _draw(weights_V, params, uniform)
    top: tuple[tuple[int, float], ...] = ()
    if params.num_logprobs:
        top = tuple(
            (int(i), float(np.float32(raw_V[i] - log_total)))
            for i in top_ids(raw_V, params.num_logprobs)
        )
    return Sampled(
        token=token, logprob=float(np.float32(raw_V[token] - log_total)), top_logprobs=top
    )


def top_ids(values_V: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, largest first, ties by lowest id; O(V)."""
    size = values_V.shape[0]
    if count >= size:
        candidates = np.arange(size, dtype=np.int64)
    else:
        threshold = np.partition(values_V, size - count)[size - count]
        candidates = np.flatnonzero(values_V >= threshold)
    order = np.argsort(-values_V[candidates], kind="stable")
    return candidates[order[:count]]


def check_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """Check ranges at the engine's door.

    Raises:
        BadRequestError: a field is out of range; `param` names it.
    """
    in_range = {
        "temperature": math.isfinite(params.temperature) and params.temperature >= 0,
        "top_p": 0 < params.top_p <= 1,
        "top_k": params.top_k >= 0,
        "min_p": 0 <= params.min_p <= 1,
        "presence_penalty": math.isfinite(params.presence_penalty),
        "frequency_penalty": math.isfinite(params.frequency_penalty),
        "max_tokens": params.max_tokens >= 0,
        "num_logprobs": 0 <= params.num_logprobs <= MAX_LOGPROBS,
        "stop_token_ids": all(0 <= token < vocab_size for token in params.stop_token_ids),
    }
    for name, good in in_range.items():
        if not good:
            raise BadRequestError(
                f"{name} is out of range: {getattr(params, name)!r}",
                remedy=f"see the allowed range of {name}",
                param=name,
            )
    for token, bias in params.logit_bias:
        _check_bias(token, bias, vocab_size)


def _check_bias(token: int, bias: float, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        problem = f"token {token} is outside [0, {vocab_size})"
    elif not math.isfinite(bias):
        problem = "a bias is not finite"
    else:
        return
    raise BadRequestError(
        f"logit_bias: {problem}",
        remedy="use the served tokenizer's ids and numbers from -100 to 100",
        param="logit_bias",
    )


def _penalised(raw_V: Floats, params: SamplingParams, counts: Mapping[int, int]) -> Floats:
    logits_V = raw_V.copy()
    for token, bias in params.logit_bias:
        logits_V[token] += bias
    for token, count in counts.items():
        logits_V[token] -= params.presence_penalty + count * params.frequency_penalty
    return logits_V


def _draw(weights_V: Floats, params: SamplingParams, uniform: float) -> int:
    """Inverse of the cumulative weights, in ascending id, over the tokens the filters keep."""
    if not params.top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _invert(weights_V, uniform)
    kept = _kept(weights_V, params)
    return int(kept[_invert(weights_V[kept], uniform)])


def _kept(weights_V: Floats, params: SamplingParams) -> Ids:
    """Ids kept by top-k, then top-p, then min-p; ascending, at least one."""
    kept: Ids = np.arange(weights_V.shape[0], dtype=np.int64)
    if params.top_k and params.top_k < kept.shape[0]:
        kept = np.sort(top_ids(weights_V, params.top_k))
    if params.top_p < 1.0:
        inner = weights_V[kept]
        total = float(inner.sum())
        # Tokens below this weight have less than 1 - top_p together: never in the nucleus.
        floor = (1.0 - params.top_p) * total / inner.shape[0]
        candidates = np.flatnonzero(inner >= min(floor, float(inner.max())))
        ranked = candidates[np.argsort(-inner[candidates], kind="stable")]
        reached = np.cumsum(inner[ranked])
        count = int(np.searchsorted(reached, params.top_p * total, side="left")) + 1
        kept = kept[np.sort(ranked[:count])]
    if params.min_p > 0.0:
        inner = weights_V[kept]
        kept = kept[inner >= params.min_p * inner.max()]
    return kept


def _invert(weights_N: Floats, uniform: float) -> int:
    cumulative = np.cumsum(weights_N)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index < weights_N.shape[0]:
        return index
    # uniform * total rounded up to the total: the last token that has any weight.
    return int(np.flatnonzero(weights_N)[-1])
