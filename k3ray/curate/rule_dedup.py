"""Rule: of documents with the same text, one stays. Reason: `duplicate`.

Which one is decided once, over all documents, by `find_duplicates`: the smallest id, so the answer
depends neither on order nor on parallelism. The rule then only carries out the decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from k3ray.curate.documents import with_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class DropDuplicates:
    """Drops the documents that the decision names."""

    documents: frozenset[str]
    name: str = "dedup"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Drop the duplicates of the batch."""
        texts, reasons = batch.column("text").to_pylist(), batch.column("reason").to_pylist()
        for row, document in enumerate(batch.column("document").to_pylist()):
            if document in self.documents and texts[row] is not None:
                texts[row], reasons[row] = None, "duplicate"
        return with_columns(batch, {"text": texts, "reason": reasons})


def find_duplicates(fingerprints: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The documents to drop.

    Args:
        fingerprints: (document, fingerprint) of every living document, in any order.

    >>> sorted(find_duplicates([("b", "1"), ("a", "1"), ("c", "2")]))
    ['b']
    """
    kept: dict[str, str] = {}
    dropped: set[str] = set()
    for document, fingerprint in fingerprints:
        best = kept.get(fingerprint)
        if best is None:
            kept[fingerprint] = document
        elif best != document:
            kept[fingerprint] = min(best, document)
            dropped.add(max(best, document))
    return frozenset(dropped)
