"""Rule: read each document's file as UTF-8; whatever is wrong with a file kills only its document.

Reasons: `vanished`, `unreadable`, `too_large`, `empty`, `binary`, `bad_utf8`.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

import pyarrow as pa

from k3ray.curate.documents import with_columns
from k3ray.curate.pydoc_texts import PYDOC_SCHEME, pydoc_text

_PROBE_BYTES = 8192
_MAX_NULS_IN_PROBE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles:
    """Fills `text`.

    Args:
        max_file_bytes: Larger files are not read to the end.
    """

    max_file_bytes: int
    name: str = "read"

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Read the files of the batch, one at a time."""
        texts, reasons = [], []
        for path in batch.column("path").to_pylist():
            text, reason = self._read(path)
            texts.append(text)
            reasons.append(reason)
        return with_columns(batch, {"text": texts, "reason": reasons})

    def _read(self, path: str) -> tuple[str | None, str | None]:
        try:
            raw = self._bytes(path)
        except FileNotFoundError:
            return None, "vanished"
        except OSError:
            return None, "unreadable"
        reason = self._reason(raw)
        if reason is not None:
            return None, reason
        try:
            return raw.decode("utf-8-sig"), None
        except UnicodeDecodeError:
            return None, "bad_utf8"

    def _reason(self, raw: bytes) -> str | None:
        if len(raw) > self.max_file_bytes:
            return "too_large"
        if not raw.strip():
            return "empty"
        return "binary" if raw[:_PROBE_BYTES].count(0) > _MAX_NULS_IN_PROBE else None

    def _bytes(self, path: str) -> bytes:
        """At most one byte more than allowed; never waits on a pipe or device."""
        scheme, colon, name = path.partition(":")
        if colon and scheme == PYDOC_SCHEME:
            return pydoc_text(name).encode()
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{path} is no regular file")
            return file.read(self.max_file_bytes + 1)
