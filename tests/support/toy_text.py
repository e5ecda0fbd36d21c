"""`ToyText`: packed sequences that a small model learns within a few steps (a `SequenceSource`)."""

from __future__ import annotations

from typing import Any

import numpy as np


class ToyText:
    """Arithmetic progressions of bytes; document borders are the same in every sequence."""

    def __init__(
        self,
        *,
        num_sequences: int,
        sequence_length: int = 64,
        borders: tuple[int, ...] | None = None,
        vocab: int = 64,
    ) -> None:
        self._num_sequences = num_sequences
        self._length = sequence_length
        self._borders = borders or (0, sequence_length)
        self._vocab = vocab

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        return self._num_sequences

    def tokens(self, index: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Start and stride depend on the index."""
        stride = 1 + index % 5
        return ((7 * index + stride * np.arange(self._length)) % self._vocab).astype(np.int32)

    def cu_seqlens(self, index: int) -> tuple[int, ...]:
        """The borders."""
        return self._borders
