"""Log-probabilities from logits: one formula for sampling, scoring and training.

In float64 with numpy, whose sum over a row does not depend on the other rows, and rounded to
float32 once: what was sampled, what is scored and what the trainer computes are the same bits when
the logits are. Legend: T rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def log_normaliser(raw_TV: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[T] log of the sum of exp over the vocabulary; a lone row [V] gives a scalar array."""
    peak_T1 = raw_TV.max(axis=-1, keepdims=True)
    total_T: npt.NDArray[np.float64] = np.log(np.exp(raw_TV - peak_T1).sum(axis=-1))
    shifted_T: npt.NDArray[np.float64] = total_T + peak_T1[..., 0]
    return shifted_T


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
    return (chosen_T - log_normaliser(raw_TV)).astype(np.float32)
