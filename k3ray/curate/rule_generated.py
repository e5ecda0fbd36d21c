"""Rule: written by people. A file that says it is machine-made goes. Reason: `generated`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa

from k3ray.curate.documents import drop_where

_HEAD_LINES = 12
_MARK = re.compile(
    r"do not (edit|modify)|@generated|auto-?\s?generated (by|from|file|code)"
    r"|this (file|module) (was|is|has been) (automatically |auto-?)?generated"
    r"|generated (automatically|by the protocol buffer|from .{0,40}openapi)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGenerated:
    """Drops texts whose first lines say that a program wrote them."""

    name: str = "generated"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Drop the generated texts of the batch."""
        return drop_where(batch, _verdict)


def _verdict(text: str) -> str | None:
    head = "\n".join(text.split("\n", _HEAD_LINES)[:_HEAD_LINES])
    return "generated" if _MARK.search(head) else None
