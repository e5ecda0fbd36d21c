"""One safetensors file, tensor by tensor: a header is checked in full, bytes are read as needed.

The format: eight bytes with the header's length, a JSON header of names with dtype, shape and
data_offsets, and the tensors' bytes back to back. Reading maps nothing into memory and executes
nothing; writing holds one tensor at a time. Source: the safetensors specification.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3ray.errors import CheckpointError
from k3ray.weights.release_layout import DTYPE_BYTES, TensorSpec
from k3ray.weights.shard import sync

MAX_HEADER_BYTES = 100_000_000
"""The reference implementation's bound."""

MAX_DIMS = 8
MAX_FILE_BYTES = 1 << 50
"""Beyond anything that a checkpoint holds: numbers in a header are refused before they are used."""

_MAX_REASON = 300
_LENGTH_BYTES = 8
_ALIGNMENT = 8

ReadBytes = Callable[[TensorSpec], bytes | bytearray | memoryview]
"""Gives a tensor's little-endian bytes when they are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and where its bytes lie in the file."""

    spec: TensorSpec
    offset: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, after checking that they fill it exactly.

    Raises:
        CheckpointError: `kind` is "unreadable", "header", "dtype", "offsets", "truncated" or
            "trailing".
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise refused(path, "truncated", f"{size} bytes with a header of {length}")
            raw = file.read(length)
    except OSError as error:
        raise refused(path, "unreadable", str(error)) from error
    tensors = _parse(path, raw, _LENGTH_BYTES + length)
    end = _LENGTH_BYTES + length
    for stored in sorted(tensors.values(), key=lambda t: (t.offset, t.spec.size_bytes)):
        if stored.offset != end:
            kind = "overlap" if stored.offset < end else "gap"
            raise refused(path, "offsets", f"{kind} before {stored.spec.name}")
        end += stored.spec.size_bytes
    if end > size:
        raise refused(path, "truncated", f"{size} bytes, {end} are named in the header")
    if end < size:
        raise refused(path, "trailing", f"{size - end} bytes after the last tensor")
    return tensors


def read_bytes(path: Path, stored: StoredTensor) -> bytearray:
    """The bytes of one tensor.

    Raises:
        CheckpointError: the file cannot be read or has become shorter.
    """
    data = bytearray(stored.spec.size_bytes)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            view, got = memoryview(data), 0
            while got < len(data):
                count = file.readinto(view[got:])
                if not count:
                    raise refused(path, "truncated", f"{stored.spec.name} ends early")
                got += count
    except OSError as error:
        raise refused(path, "unreadable", str(error)) from error
    return data


def write_file(
    path: Path, specs: Sequence[TensorSpec], read: ReadBytes, *, metadata: Mapping[str, str]
) -> None:
    """Write a file and fsync it.

    Args:
        path: Must not exist.
        specs: Its tensors, in the order of their bytes.
        read: Asked once for each, in that order.
        metadata: Goes under `__metadata__`.

    Raises:
        ValueError: `read` gave another number of bytes.
        OSError: the disk is full or failing.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.size_bytes],
        }
        at += spec.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for spec in specs:
            data = read(spec)
            if len(data) != spec.size_bytes:
                raise ValueError(f"{spec.name}: {len(data)} bytes for {spec.size_bytes}")
            file.write(data)
        sync(file)


def require_file(path: Path, *, most_bytes: int = MAX_FILE_BYTES) -> None:
    """Refuse what is no regular file (a pipe would never end), or is larger than `most_bytes`.

    Raises:
        CheckpointError: `kind` "missing" or "unreadable".
    """
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise refused(path, "missing", "there is no such file") from error
    except OSError as error:
        raise refused(path, "unreadable", str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise refused(path, "unreadable", "this is not a regular file")
    if found.st_size > most_bytes:
        raise refused(path, "unreadable", f"{found.st_size} bytes, {most_bytes} are the most")


def refused(path: Path, kind: str, reason: str) -> CheckpointError:
    """The error that refuses a checkpoint because of one of its files."""
    reason = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason[:_MAX_REASON])
    return CheckpointError(
        f"{path}: {kind}: {reason}",
        remedy="nothing was loaded; copy the file again or use another checkpoint",
        kind=kind,
        path=str(path),
    )


def _parse(path: Path, raw: bytes, data_start: int) -> dict[str, StoredTensor]:
    try:
        header = json.loads(raw, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise refused(path, "header", f"not JSON: {error}") from error
    if not isinstance(header, dict):
        raise refused(path, "header", "no mapping")
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _entry(path, name, entry, data_start)
    return tensors


def _entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise refused(path, "header", f"{name} lacks dtype, shape or data_offsets") from error
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise refused(path, "header", f"{name} has sizes that are no numbers")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise refused(path, "dtype", f"{name} has dtype {dtype}, not {', '.join(DTYPE_BYTES)}")
    if len(shape) > MAX_DIMS or max(numbers) > MAX_FILE_BYTES:
        raise refused(path, "shape", f"{name} has {len(shape)} dims or a size beyond any file")
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise refused(path, "offsets", f"{name} has {end - begin} bytes for {dtype} {shape}")
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
    return StoredTensor(spec=spec, offset=data_start + begin)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no name occurs twice; for `object_pairs_hook`."""
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a name occurs twice")
    return document
