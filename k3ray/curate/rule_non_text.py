"""Rule: mostly letters. Tables of numbers, encoded blobs and ASCII art go. Reason: `non_text`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from k3ray.curate.documents import drop_where

_BLANK = np.isin(np.arange(256), list(b" \t\n"))
_LETTER = np.array([value >= 128 or chr(value).isalpha() for value in range(256)])


@dataclass(frozen=True, slots=True, kw_only=True)
class DropNonText:
    """Drops texts in which letters are too small a share of what is not blank."""

    min_letter_share: float = 0.45
    name: str = "non_text"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Drop the texts of the batch that are not text."""
        return drop_where(
            batch, lambda text: "non_text" if letter_share(text) < self.min_letter_share else None
        )


def letter_share(text: str) -> float:
    """Share of letters among the non-blank UTF-8 bytes; bytes above ASCII count as letters.

    >>> letter_share("ab 12")
    0.5
    """
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    num_written = raw.size - np.count_nonzero(_BLANK[raw])
    return float(np.count_nonzero(_LETTER[raw]) / num_written) if num_written else 0.0
