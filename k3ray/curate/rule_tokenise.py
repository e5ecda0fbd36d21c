"""Rule: living documents -> tokens, each document ended by `[EOS]`; special ids never from text."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from k3ray.curate.documents import living
from k3ray.text.tokenizer import K3Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenise:
    """Adds a column `tokens` (list of int32) and keeps the living rows only."""

    tokenizer: K3Tokenizer
    name: str = "tokenise"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Tokenise the texts of the batch, one after the other."""
        batch = living(batch)
        end = [self.tokenizer.eos_id]
        tokens = [self.tokenizer.encode(text) + end for text in batch.column("text").to_pylist()]
        column = pa.array(tokens, type=pa.large_list(pa.int32()))
        return batch.append_column(pa.field("tokens", column.type), column)
