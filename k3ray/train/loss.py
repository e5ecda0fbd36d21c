"""Next-token loss. Legend: T tokens, V vocabulary."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

IGNORED = -100
"""Target of a token on which no loss is taken."""


def loss_sum(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Sum of the negative log-likelihoods in nats, float32 scalar.

    The sum, not the mean: a step's loss is the mean over the tokens of the whole step, so the
    caller divides once, by the count over all micro-batches.

    Args:
        logits_TV: [T, V] float32.
        targets_T: [T] int64, `IGNORED` where no loss is taken.
    """
    return cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="sum")


def num_targets(targets_T: torch.Tensor) -> int:
    """How many tokens carry loss."""
    return int((targets_T != IGNORED).sum())
