"""Rule: a document needs a minimum of characters. Reason: `too_short`."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from k3ray.curate.documents import drop_where


@dataclass(frozen=True, slots=True, kw_only=True)
class DropShort:
    """Drops texts of fewer than `min_chars` characters, blanks at the ends not counted."""

    min_chars: int
    name: str = "short"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Drop the short texts of the batch."""
        return drop_where(
            batch, lambda text: "too_short" if len(text.strip()) < self.min_chars else None
        )
