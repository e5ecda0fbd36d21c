"""`Manifest`: what a store entry consists of: shards, tensors, a digest of each, one of all.

The manifest is written last, so an entry with a manifest is whole. It guards itself with a
checksum. The entry's digest covers names, dtypes, shapes and bytes of the tensors, not how they
are cut into shards: the same weights have the same digest under any partition of the experts.
No torch here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from k3ray.errors import StoreError
from k3ray.weights.version import WeightVersion

FORMAT = 1
"""Version of the manifest's own layout."""

Meta = Mapping[str, str | int | float | bool | None]


class EntryKind(StrEnum):
    """Serving weights, or master weights with optimizer moments."""

    VERSION = "version"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor: safetensors dtype word, shape, place in its shard's file, digest of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One written shard; what its writer hands to the committer."""

    name: str
    size_bytes: int
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole entry; `digest` is `content_digest` of the shards."""

    kind: EntryKind
    line: str
    step: int
    digest: str
    created_unix_s: float
    shards: tuple[ShardInfo, ...]
    meta: Meta

    @property
    def version(self) -> WeightVersion:
        """The version (or checkpoint) that this entry holds."""
        return WeightVersion(line=self.line, step=self.step, digest=self.digest)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size_bytes for shard in self.shards)

    def tensors(self) -> dict[str, tuple[ShardInfo, TensorInfo]]:
        """Where each tensor lies, by name."""
        return {info.name: (shard, info) for shard in self.shards for info in shard.tensors}

    def to_json(self) -> str:
        """The manifest's file, checksum included."""
        body = asdict(self)
        return json.dumps(
            {"format": FORMAT, "checksum": _checksum(body), "body": body}, sort_keys=True
        )

    @staticmethod
    def from_json(text: str, *, where: str) -> Manifest:
        """Read a manifest's file.

        Raises:
            StoreError: damaged, or of another format.
        """
        try:
            data = json.loads(text)
            body = data["body"]
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, this code reads {FORMAT}")
            if data["checksum"] != _checksum(body):
                raise ValueError("checksum mismatch")
            return _manifest(body)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"manifest {where} is damaged: {error}",
                remedy="delete the entry; older entries are not affected",
                path=where,
            ) from error


def content_digest(shards: Sequence[ShardInfo]) -> str:
    """Digest over every tensor's name, dtype, shape and bytes, in name order.

    Raises:
        StoreError: a tensor lies in two shards.
    """
    infos = sorted((info for shard in shards for info in shard.tensors), key=lambda i: i.name)
    for before, after in itertools.pairwise(infos):
        if before.name == after.name:
            raise StoreError(
                f"tensor {after.name} lies in two shards",
                remedy="every tensor is written by exactly one holder: its home",
                tensor=after.name,
            )
    digest = hashlib.blake2b(digest_size=16)
    for info in infos:
        digest.update(f"{info.name}\0{info.dtype}\0{info.shape}\0{info.digest}\n".encode())
    return digest.hexdigest()


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _manifest(body: Mapping[str, Any]) -> Manifest:
    shards = tuple(
        ShardInfo(
            name=shard["name"],
            size_bytes=shard["size_bytes"],
            tensors=tuple(
                TensorInfo(**{**info, "shape": tuple(info["shape"])}) for info in shard["tensors"]
            ),
        )
        for shard in body["shards"]
    )
    return Manifest(
        kind=EntryKind(body["kind"]),
        line=body["line"],
        step=body["step"],
        digest=body["digest"],
        created_unix_s=body["created_unix_s"],
        shards=shards,
        meta=body["meta"],
    )
