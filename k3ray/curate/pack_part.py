"""One part, from living documents to a shard, with the counts that the report needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from k3ray.curate.rule_pack import Pack
from k3ray.curate.storage import file_sha256, write_arrow

PACKED = pa.schema(
    {
        "part": pa.int32(),
        "split": pa.string(),
        "file": pa.string(),
        "sha256": pa.string(),
        "size_bytes": pa.int64(),
        "num_sequences": pa.int64(),
        "num_documents": pa.int64(),
        "num_tokens": pa.int64(),
        "text_bytes": pa.int64(),
        "byte_counts": pa.list_(pa.int64()),
        "token_counts": pa.list_(pa.int64()),
    }
)
"""Facts of a written shard, one row per part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackAndWrite:
    """The last step: a part's tokenised documents -> a shard on disk and one row of facts.

    Args:
        folder: Where the shard goes, named after its part.
        sequence_length: Tokens of a sequence.
        vocab_size: Length of the token counts.
    """

    folder: str
    sequence_length: int
    vocab_size: int

    def __call__(self, batch: pa.RecordBatch, *, part: int, split: str) -> pa.RecordBatch:
        """Write the shard of the batch."""
        packed = Pack(sequence_length=self.sequence_length)(batch)
        path = Path(self.folder) / f"part-{part:05d}.arrow"
        write_arrow(path, packed)
        tokens = batch.column("tokens").flatten().to_numpy()
        raw = _bytes_of(batch.column("text"))
        row = {
            "part": part, "split": split, "file": path.name, "sha256": file_sha256(path),
            "size_bytes": path.stat().st_size, "num_sequences": packed.num_rows,
            "num_documents": batch.num_rows, "num_tokens": len(tokens), "text_bytes": len(raw),
            "byte_counts": np.bincount(raw, minlength=256).tolist(),
            "token_counts": np.bincount(tokens, minlength=self.vocab_size).tolist(),
        }  # fmt: skip
        return pa.RecordBatch.from_pylist([row], schema=PACKED)


def _bytes_of(texts: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer("".join(texts.to_pylist()).encode(), dtype=np.uint8)
