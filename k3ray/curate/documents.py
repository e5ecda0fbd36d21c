"""The batch that every rule takes and returns: one row per document, dead or alive.

A rule never removes a row. It sets `reason` and empties `text`, so that the funnel can be counted
from the rows at the end of the chain, whatever ran in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from k3ray.curate.sources import SourceFile

DOCUMENTS = pa.schema(
    {
        "part": pa.int32(),  # unit of work and of packing; fixed before anything runs
        "split": pa.string(),  # train or heldout
        "document": pa.string(),  # id, independent of the machine: stdlib/json/decoder.py
        "package": pa.string(),
        "path": pa.string(),
        "text": pa.large_string(),  # null: not read yet, or dead
        "reason": pa.string(),  # null: alive
        "fingerprint": pa.string(),  # SHA-256 of the cleaned text
    }
)


class Rule(Protocol):
    """One step of the chain, picklable."""

    @property
    def name(self) -> str:
        """Short name for reports."""
        ...

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with this rule applied to its living documents."""
        ...


def documents_of(files: Iterable[SourceFile], *, part: int, split: str) -> pa.RecordBatch:
    """Unread documents of one part."""
    rows = [
        {
            "part": part, "split": split, "document": file.document, "package": file.package,
            "path": file.path,
        }
        for file in files
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema=DOCUMENTS)


def with_columns(batch: pa.RecordBatch, columns: dict[str, Sequence[Any]]) -> pa.RecordBatch:
    """The batch with some columns replaced."""
    for name, values in columns.items():
        index = batch.schema.get_field_index(name)
        field = batch.schema.field(index)
        batch = batch.set_column(index, field, pa.array(values, type=field.type))
    return batch


def map_text(batch: pa.RecordBatch, change: Callable[[str], str]) -> pa.RecordBatch:
    """Every living text replaced by `change(text)`."""
    texts = batch.column("text").to_pylist()
    return with_columns(batch, {"text": [None if text is None else change(text) for text in texts]})


def drop_where(batch: pa.RecordBatch, verdict: Callable[[str], str | None]) -> pa.RecordBatch:
    """Living documents for which `verdict(text)` names a reason become dead."""
    texts: list[str | None] = batch.column("text").to_pylist()
    reasons: list[str | None] = batch.column("reason").to_pylist()
    for row, text in enumerate(texts):
        found = None if text is None else verdict(text)
        if found is not None:
            texts[row], reasons[row] = None, found
    return with_columns(batch, {"text": texts, "reason": reasons})


def living(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Only the rows with a text."""
    return batch.filter(batch.column("text").is_valid())
