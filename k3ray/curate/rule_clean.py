"""Rule: one spelling of the same text, so that equal documents have equal fingerprints.

Newlines become LF, control characters other than tab and newline go, lines lose trailing blanks,
the text its leading and trailing empty lines; Unicode is in NFC. Applying it twice changes nothing.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import pyarrow as pa

from k3ray.curate.documents import map_text

_CONTROL = dict.fromkeys([*range(9), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F, 0xFEFF])


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanText:
    """Normalises every living text."""

    name: str = "clean"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Clean the texts of the batch."""
        return map_text(batch, clean_text)


def clean_text(text: str) -> str:
    r"""The cleaned text; linear time.

    >>> clean_text("\r\n a \t\r\nb\x00\x0c  \r\n\n")
    ' a\nb\n'
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROL)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    lines = [line.rstrip(" \t") for line in text.split("\n")]
    return "\n".join(lines).strip("\n") + "\n"
