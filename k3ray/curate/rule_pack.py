"""Rule: documents' tokens -> full sequences with document borders.

Documents are laid end to end in the batch's order and cut every `sequence_length` tokens; a
document that is cut goes on in the next sequence as a piece of its own. The incomplete sequence at
the end of a part is left out (and counted by the caller), so there is no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from k3ray.model.packed_data import packed_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A batch with `document` and `tokens` -> a batch of `packed_schema`."""

    sequence_length: int
    name: str = "pack"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Pack the documents of the batch. O(tokens)."""
        length = self.sequence_length
        column = batch.column("tokens")
        flat = column.flatten().to_numpy()
        # ends[d] is the position after document d's last token
        ends = np.cumsum(column.value_lengths().to_numpy(), dtype=np.int64)
        num_sequences = len(flat) // length
        names = batch.column("document").to_pylist()
        borders: list[list[int]] = []
        documents: list[list[str]] = []
        for start in range(0, num_sequences * length, length):
            first = int(np.searchsorted(ends, start, side="right"))
            last = int(np.searchsorted(ends, start + length, side="left"))
            inner = [int(end) - start for end in ends[first:last]]
            borders.append([0, *inner, length])
            documents.append(names[first : last + 1])
        schema = packed_schema(length)
        tokens = pa.FixedSizeListArray.from_arrays(
            pa.array(flat[: num_sequences * length], type=pa.int32()), length
        )
        return pa.RecordBatch.from_arrays(
            [
                tokens.cast(schema.field("tokens").type),
                pa.array(borders, type=schema.field("cu_seqlens").type),
                pa.array(documents, type=schema.field("documents").type),
            ],
            schema=schema,
        )
