"""What curation did, in numbers: the funnel, sizes, and baselines in bits per byte."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3ray.model.packed_data import HELDOUT, TRAIN

MAX_SAMPLES = 5
REASONS = (
    "vanished", "unreadable", "too_large", "empty", "binary", "bad_utf8", "too_short",
    "huge_line", "minified", "non_text", "generated", "duplicate",
)  # fmt: skip
"""In the order in which the chain decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFact:
    """What became of one selected file; `reason` is None for a living document."""

    document: str
    package: str
    split: str
    part: int
    size_bytes: int
    text_bytes: int
    reason: str | None
    fingerprint: str | None


def funnel(facts: Iterable[DocumentFact], *, num_listed: int) -> list[dict[str, Any]]:
    """One row per step: how many documents and file bytes it took, how many are left."""
    by_reason: dict[str | None, list[DocumentFact]] = defaultdict(list)
    for fact in facts:
        by_reason[fact.reason].append(fact)
    left = sum(map(len, by_reason.values()))
    rows = [
        {"step": "listed", "documents_left": num_listed},
        {"step": "selected", "documents_dropped": num_listed - left, "documents_left": left},
    ]
    for reason in REASONS:
        dropped = by_reason.get(reason, [])
        left -= len(dropped)
        rows.append(
            {
                "step": reason, "documents_dropped": len(dropped), "documents_left": left,
                "file_bytes_dropped": sum(fact.size_bytes for fact in dropped),
                "samples": sorted(fact.document for fact in dropped)[:MAX_SAMPLES],
            }
        )  # fmt: skip
    return rows


def split_totals(rows: Sequence[Mapping[str, Any]], split: str) -> dict[str, Any]:
    """Sums over the shards of one split (rows of `pack_part.PACKED`)."""
    mine = [row for row in rows if row["split"] == split]
    totals = {
        key: sum(row[key] for row in mine)
        for key in ("num_documents", "num_sequences", "num_tokens", "text_bytes")
    }
    ratio = totals["text_bytes"] / totals["num_tokens"] if totals["num_tokens"] else 0.0
    return {**totals, "bytes_per_token": ratio}


def unigram_baselines(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Bits per byte of the held-out text under unigrams fitted on the training text.

    `token_unigram` also pays for each document's `[EOS]`, as a language model does. None without
    held-out text.
    """
    counts = {
        (split, kind): _summed(rows, split, kind)
        for split in (TRAIN, HELDOUT)
        for kind in ("byte_counts", "token_counts")
    }
    num_bytes = int(counts[HELDOUT, "byte_counts"].sum())
    return {
        name: unigram_bits(counts[TRAIN, kind], counts[HELDOUT, kind]) / num_bytes
        if num_bytes
        else None
        for name, kind in (("byte_unigram", "byte_counts"), ("token_unigram", "token_counts"))
    }


def unigram_bits(
    fitted: np.ndarray[Any, np.dtype[np.int64]], coded: np.ndarray[Any, np.dtype[np.int64]]
) -> float:
    """Bits that coding `coded` (counts) takes under add-one smoothed `fitted` (counts).

    >>> unigram_bits(np.array([1, 1]), np.array([3, 5]))
    8.0
    """
    probabilities = (fitted + 1.0) / (fitted.sum() + len(fitted))
    return float(-(coded * np.log2(probabilities)).sum())


def _summed(
    rows: Sequence[Mapping[str, Any]], split: str, kind: str
) -> np.ndarray[Any, np.dtype[np.int64]]:
    mine = [np.asarray(row[kind], dtype=np.int64) for row in rows if row["split"] == split]
    return np.sum(mine, axis=0) if mine else np.zeros(1, dtype=np.int64)
