"""Log-probabilities from logits: one formula for sampling, scoring and training.

In float64 with numpy, whose sum over a row does not depend on the other rows, and rounded to
float32 once: what was sampled, what is scored and what the trainer computes are the same bits when
the logits are. Legend: T rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def exponentials(raw_TV: Floats) -> tuple[Floats, Floats]:
    """What a softmax is made of.

    Args:
        raw_TV: [T, V] logits, or one row [V].

    Returns:
        ([T, V] exp of the logits minus their largest, [T] log of the sum of exp of the logits).
    """
    peak_T1 = raw_TV.max(axis=-1, keepdims=True)
    weights_TV = np.exp(raw_TV - peak_T1)
    log_total_T: Floats = np.log(weights_TV.sum(axis=-1)) + peak_T1[..., 0]
    return weights_TV, log_total_T


def token_logprobs(
    logits_TV: npt.NDArray[np.float32], targets_T: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Natural log-probability of each target.

    Args:
        logits_TV: [T, V] float32, finite.
        targets_T: [T] int64.

    Returns:
        [T] float32.
    """
    raw_TV = np.ascontiguousarray(logits_TV, dtype=np.float64)
    chosen_T = raw_TV[np.arange(len(targets_T)), targets_T]
    _, log_total_T = exponentials(raw_TV)
    return (chosen_T - log_total_T).astype(np.float32)
