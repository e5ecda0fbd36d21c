"""Rule: text has lines that people read. Reasons: `huge_line`, `minified`."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from k3ray.curate.documents import drop_where


@dataclass(frozen=True, slots=True, kw_only=True)
class DropUnreadableLines:
    """Drops texts with a line that is huge, or with lines that are long on average.

    Args:
        max_line_chars: A longer line is a blob of data.
        max_mean_line_chars: Over the lines that are not empty; above it the text is minified.
    """

    max_line_chars: int = 5000
    max_mean_line_chars: float = 200.0
    name: str = "lines"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Drop the texts of the batch that have no readable lines."""
        return drop_where(batch, self._verdict)

    def _verdict(self, text: str) -> str | None:
        lengths = [len(line) for line in text.split("\n") if line]
        if max(lengths, default=0) > self.max_line_chars:
            return "huge_line"
        if sum(lengths) > self.max_mean_line_chars * len(lengths):
            return "minified"
        return None
