"""Reading packed data sets: `PackedDataset`, O(1) per sequence over memory-mapped Arrow files.

Layout: `manifest.json` (written last: without it there is no data set), `tokenizer/tokenizer.json`,
`train/shard-00000.arrow`, `heldout/shard-00000.arrow`, `report.json`. A sequence is a full row of
`sequence_length` tokens, cut into pieces of documents by `cu_seqlens`; there is no padding.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from k3ray.errors import DataError

MANIFEST: Final = "manifest.json"
FORMAT: Final = "k3ray-packed-1"
TRAIN: Final = "train"
HELDOUT: Final = "heldout"


def packed_schema(sequence_length: int) -> pa.Schema:
    """Columns of a shard: tokens, document borders, and the documents' ids (lineage)."""
    return pa.schema(
        {
            "tokens": pa.list_(pa.int32(), sequence_length),
            "cu_seqlens": pa.list_(pa.int32()),
            "documents": pa.list_(pa.string()),
        }
    )


class PackedDataset:
    """One split of a packed data set. Cheap to open, nothing is read ahead.

    Args:
        root: The data set's folder.
        manifest: Its parsed manifest.
        split: `train` or `heldout`.
    """

    def __init__(self, root: Path, manifest: Mapping[str, Any], split: str) -> None:
        self.root = root
        self.manifest = manifest
        self.split = split
        self.sequence_length = int(manifest["sequence_length"])
        self._shards = [
            _read_shard(root, shard, self.sequence_length)
            for shard in manifest["splits"][split]["shards"]
        ]
        self._ends = list(accumulate(shard.num_rows for shard in self._shards))

    @staticmethod
    def open(directory: str | Path, *, split: str = TRAIN) -> PackedDataset:
        """Open a whole data set.

        Raises:
            DataError: there is no manifest, it is damaged, or a shard differs from it.
        """
        root = Path(directory)
        manifest = read_manifest(root)
        if manifest is None:
            raise DataError(
                f"{root} holds no whole data set (no {MANIFEST})",
                remedy="run `python -m pipelines.curate` first", path=str(root),
            )  # fmt: skip
        if split not in manifest["splits"]:
            raise DataError(
                f"{root} has no split {split!r}",
                remedy=f"choose one of {', '.join(manifest['splits'])}", path=str(root),
            )  # fmt: skip
        return PackedDataset(root, manifest, split)

    @property
    def num_sequences(self) -> int:
        """Sequences in this split."""
        return self._ends[-1] if self._ends else 0

    @property
    def tokenizer_file(self) -> Path:
        """The data set's `tokenizer.json`."""
        return self.root / str(self.manifest["tokenizer"]["file"])

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token of this split (`[EOS]` counts as a token)."""
        return float(self.manifest["splits"][self.split]["bytes_per_token"])

    def tokens(self, index: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Tokens of one sequence, [sequence_length] int32, read-only."""
        shard, row = self._locate(index)
        flat = shard.column("tokens").flatten()
        start = row * self.sequence_length
        tokens: np.ndarray[Any, np.dtype[np.int32]] = flat.slice(
            start, self.sequence_length
        ).to_numpy()
        return tokens

    def cu_seqlens(self, index: int) -> tuple[int, ...]:
        """Document borders of one sequence: 0 first, `sequence_length` last, increasing."""
        shard, row = self._locate(index)
        return tuple(shard.column("cu_seqlens")[row].as_py())

    def documents(self, index: int) -> tuple[str, ...]:
        """The ids of the documents whose pieces make up one sequence."""
        shard, row = self._locate(index)
        return tuple(shard.column("documents")[row].as_py())

    def _locate(self, index: int) -> tuple[pa.RecordBatch, int]:
        if not 0 <= index < self.num_sequences:
            raise DataError(
                f"sequence {index} of {self.num_sequences} in {self.root}/{self.split}",
                remedy="indices count from 0", index=index,
            )  # fmt: skip
        shard = bisect_right(self._ends, index)
        return self._shards[shard], index - (self._ends[shard - 1] if shard else 0)


def read_manifest(root: Path) -> dict[str, Any] | None:
    """The manifest of the data set at `root`; None when there is no whole data set.

    Raises:
        DataError: the manifest is damaged or of another format.
    """
    try:
        manifest: dict[str, Any] = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{root / MANIFEST} is damaged: {error}", remedy="curate into a new folder",
            path=str(root),
        ) from error  # fmt: skip
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(
            f"{root / MANIFEST} is not of format {FORMAT}", remedy="curate into a new folder",
            path=str(root),
        )  # fmt: skip
    return manifest


def _read_shard(root: Path, shard: Mapping[str, Any], sequence_length: int) -> pa.RecordBatch:
    path = root / str(shard["file"])
    try:
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"shard {path} cannot be read: {error}", remedy="curate the data set again",
            path=str(path),
        ) from error  # fmt: skip
    whole = (
        batch.num_rows == shard["num_sequences"]
        and batch.schema.equals(packed_schema(sequence_length))
        and path.stat().st_size == shard["size_bytes"]
    )
    if not whole:
        raise DataError(
            f"shard {path} does not hold what the manifest says",
            remedy="curate the data set again", path=str(path),
        )  # fmt: skip
    return batch
