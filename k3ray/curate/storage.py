"""Files of a data set in the making: Arrow and JSON, each complete on disk or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from k3ray.errors import DataError


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Temporary file, fsync, rename.

    Raises:
        DataError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        _remove(temporary)
        raise DataError(
            f"cannot write {path}: {error.strerror or error}",
            remedy="free disk space or choose another out_dir, then run again",
            path=str(path), errno=error.errno,
        ) from error  # fmt: skip


def write_arrow(path: Path, batch: pa.RecordBatch) -> None:
    """One batch as an uncompressed Arrow file, readable by memory map."""

    def write(file: BinaryIO) -> None:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)

    write_atomically(path, write)


def read_arrow(path: Path) -> pa.RecordBatch:
    """The batch of a file from `write_arrow`, memory-mapped.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).get_batch(0)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"cannot read {path}: {error}", remedy="run the curation again", path=str(path)
        ) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Sorted keys, so that equal values give equal bytes."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: _write_all(file, text.encode()))


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the error that led here is the one to report
