"""`PackedBatch`: several documents in one flat token sequence, typed and ragged.

Legend: T tokens of the batch. Every document restarts KDA state, convolutions and attention, and
its chunk grid of 64 starts at its own first token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Flat documents.

    Args:
        tokens_T: [T] int64.
        cu_seqlens: document borders, 0 first and T last, strictly increasing.
        targets_T: [T] int64 next tokens, -100 where no loss is taken; None for inference.
    """

    tokens_T: torch.Tensor
    cu_seqlens: tuple[int, ...]
    targets_T: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.tokens_T.shape[0])
