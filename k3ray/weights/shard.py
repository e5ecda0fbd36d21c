"""One shard: a safetensors file written atomically, each tensor with its own digest.

Readers check the digest of every tensor that they read. Files are written to a temporary name,
fsynced and renamed, so a file with a shard's name is whole. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from k3ray.errors import StoreError
from k3ray.weights.manifest import ShardInfo, TensorInfo

Array = npt.NDArray[np.generic]

_DTYPES: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_WORDS = {np.dtype(code): word for word, code in _DTYPES.items()}


def write_shard_file(path: Path, name: str, tensors: Mapping[str, Array]) -> ShardInfo:
    """Write `tensors` to `path` (ending in `name`.safetensors) and describe the result.

    Raises:
        StoreError: the disk is full or failing (nothing is left behind), or a dtype is unknown.
    """
    arrays = {key: np.ascontiguousarray(tensors[key]) for key in sorted(tensors)}
    header, starts = _header(arrays)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    infos = []
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for key, array in arrays.items():
                data = array.reshape(-1).view(np.uint8).data
                file.write(data)
                infos.append(
                    TensorInfo(
                        name=key,
                        dtype=_WORDS[array.dtype],
                        shape=tuple(array.shape),
                        offset=len(header) + starts[key],
                        size_bytes=array.nbytes,
                        digest=_digest(data),
                    )
                )
            sync(file)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write shard {path}: {error}",
            remedy="free disk space or point store_dir elsewhere; no entry was touched",
            path=str(path),
            errno=error.errno,
        ) from error
    size = infos[-1].offset + infos[-1].size_bytes if infos else len(header)
    return ShardInfo(name=name, size_bytes=size, tensors=tuple(infos))


def read_tensors(path: Path, infos: Sequence[TensorInfo]) -> dict[str, Array]:
    """Read tensors of one shard into fresh arrays and check their digests.

    Raises:
        StoreError: the file is missing or short, or a digest does not match.
    """
    result: dict[str, Array] = {}
    try:
        with path.open("rb") as file:
            for info in sorted(infos, key=lambda i: i.offset):
                raw = np.empty(info.size_bytes, dtype=np.uint8)
                file.seek(info.offset)
                if file.readinto(raw.data) != info.size_bytes:
                    raise _damaged(path, info, "the file is too short")
                if _digest(raw.data) != info.digest:
                    raise _damaged(path, info, "its digest does not match")
                array = raw.view(np.dtype(_DTYPES[info.dtype])).reshape(info.shape)
                result[info.name] = array
    except OSError as error:
        raise StoreError(
            f"cannot read shard {path}: {error}",
            remedy="restore the store folder or delete the entry",
            path=str(path),
        ) from error
    return result


def sync(file: IO[bytes]) -> None:
    """Flush and fsync an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _header(arrays: Mapping[str, Array]) -> tuple[bytes, dict[str, int]]:
    """The safetensors header (8-byte length + JSON, padded to 8) and each tensor's start."""
    entries: dict[str, object] = {}
    starts: dict[str, int] = {}
    position = 0
    for key, array in arrays.items():
        word = _WORDS.get(array.dtype)
        if word is None:
            raise StoreError(
                f"tensor {key} has dtype {array.dtype}, which the store does not hold",
                remedy=f"convert it to one of {', '.join(sorted(_DTYPES))}",
                tensor=key,
            )
        starts[key] = position
        end = position + array.nbytes
        entries[key] = {
            "dtype": word, "shape": list(array.shape), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def _digest(data: memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _damaged(path: Path, info: TensorInfo, why: str) -> StoreError:
    return StoreError(
        f"tensor {info.name} of {path} is damaged: {why}",
        remedy="delete the entry and use an older one; see `k3ray status`",
        path=str(path),
        tensor=info.name,
    )
