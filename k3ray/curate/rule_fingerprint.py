"""Rule: the identity of a text, SHA-256 of its UTF-8, on which exact dedup decides."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pyarrow as pa

from k3ray.curate.documents import with_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Fills `fingerprint` of living documents."""

    name: str = "fingerprint"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Fingerprint the texts of the batch."""
        marks = [
            None if text is None else hashlib.sha256(text.encode()).hexdigest()
            for text in batch.column("text").to_pylist()
        ]
        return with_columns(batch, {"fingerprint": marks})
