"""A checkpoint folder in the release's layout, opened only if it is whole.

`Checkpoint.open` reads `config.json`, the index (or a single `model.safetensors`) and every file's
header, and compares names, dtypes and shapes with what the config asks for: nothing missing,
nothing extra. The experts' format is told by the tensors, not by the config's quantisation section.
Bytes are read tensor by tensor. How they are distributed over files does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3ray.config.load import read_mapping
from k3ray.config.model import ModelConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.config.release import read_release_config
from k3ray.errors import CheckpointError, ConfigError
from k3ray.weights.release_layout import TensorSpec, num_routed, release_shards
from k3ray.weights.safetensors_io import (
    StoredTensor,
    no_duplicates,
    read_bytes,
    read_header,
    refused,
    require_file,
)

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_NAMED = 3
"""Names quoted in an error."""
MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_INDEX_BYTES = 512 * 1024 * 1024
"""The release's index has 60 MB; what is far larger is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose structure has been checked; its numbers are checked when read.

    Args:
        path: The folder.
        model: From its `config.json`.
        experts: How the routed experts are stored.
        tensors: Where every tensor lies: (file, place in it) by name.
    """

    path: Path
    model: ModelConfig
    experts: ExpertFormat
    tensors: Mapping[str, tuple[Path, StoredTensor]]

    @staticmethod
    def open(path: Path | str) -> Checkpoint:
        """Open and check.

        Raises:
            CheckpointError: `kind` is one of those of `read_header`, or "config", "index",
                "missing", "extra", "misplaced", "format", "dtype", "shape".
        """
        folder = Path(path)
        model = _read_config(folder / CONFIG_FILE)
        tensors, weight_map, total_size = _read_files(folder)
        if weight_map is not None:
            _compare_index(folder / INDEX_FILE, weight_map, tensors)
        experts = _format_of(folder, tensors)
        _compare(folder, model, experts, {n: s.spec for n, (_, s) in tensors.items()})
        held = sum(stored.spec.size_bytes for _, stored in tensors.values())
        if total_size not in (None, held):
            reason = f"total_size is {total_size}, the tensors have {held} bytes"
            raise refused(folder / INDEX_FILE, "index", reason)
        return Checkpoint(path=folder, model=model, experts=experts, tensors=tensors)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor."""
        return self.tensors[name][1].spec

    def read(self, name: str) -> bytearray:
        """A tensor's bytes, little-endian.

        Raises:
            CheckpointError: the file has changed since, or cannot be read.
        """
        return read_bytes(*self.tensors[name])

    def extras(self) -> tuple[Path, ...]:
        """The folder's other regular files: tokenizer, licence, code."""
        own = {CONFIG_FILE, INDEX_FILE, *(path.name for path, _ in self.tensors.values())}
        others = (p for p in self.path.iterdir() if p.name not in own and p.is_file())
        return tuple(sorted(p for p in others if not p.name.startswith(".")))

    def config_document(self) -> dict[str, Any]:
        """Its `config.json` as it lies there, with keys that mean nothing to the model."""
        return read_mapping(str(self.path / CONFIG_FILE))

    def by_file(self) -> Iterator[TensorSpec]:
        """All tensors in the order in which they lie on disk."""
        places = sorted(self.tensors.values(), key=lambda place: (place[0].name, place[1].offset))
        return (stored.spec for _, stored in places)


def _read_config(path: Path) -> ModelConfig:
    if path.exists():
        require_file(path, most_bytes=MAX_CONFIG_BYTES)
    try:
        return read_release_config(str(path))
    except ConfigError as error:
        raise CheckpointError(
            f"{path}: config: {error.message}", remedy=error.remedy, kind="config",
            path=str(path), violations=error.fields.get("violations", ()),
        ) from error  # fmt: skip


def _read_files(
    folder: Path,
) -> tuple[dict[str, tuple[Path, StoredTensor]], dict[str, str] | None, int | None]:
    """Tensors by name with their files; the index's map and total size where there is one."""
    weight_map: dict[str, str] | None = None
    total_size: int | None = None
    if (folder / INDEX_FILE).exists():
        weight_map, total_size = _read_index(folder / INDEX_FILE)
        files = sorted(set(weight_map.values()))
    elif (folder / SINGLE_FILE).exists():
        files = [SINGLE_FILE]
    else:
        raise refused(folder, "missing", f"neither {INDEX_FILE} nor {SINGLE_FILE}")
    present = {p.name for p in folder.iterdir() if p.name in files or p.suffix == ".safetensors"}
    if absent := sorted(set(files) - present):
        raise refused(folder, "missing", f"{len(absent)} files: {', '.join(absent[:MAX_NAMED])}")
    if surplus := sorted(present - set(files)):
        raise refused(folder, "extra", f"files not in the index: {', '.join(surplus[:MAX_NAMED])}")
    tensors: dict[str, tuple[Path, StoredTensor]] = {}
    for file in files:
        path = folder / file
        for name, stored in read_header(path).items():
            if name in tensors:
                raise refused(path, "extra", f"{name} is in {tensors[name][0].name}, too")
            tensors[name] = (path, stored)
    return tensors, weight_map, total_size


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """Files by tensor, and the bytes of all tensors if the index says them."""
    require_file(path, most_bytes=MAX_INDEX_BYTES)
    try:
        document: Any = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates
        )
        weight_map = document["weight_map"]
        total_size = document.get("metadata", {}).get("total_size")
        ok = all(
            isinstance(name, str) and isinstance(file, str) and Path(file).name == file
            for name, file in weight_map.items()
        )
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise refused(path, "index", f"{type(error).__name__}: {error}") from error
    if not ok:
        raise refused(path, "index", "weight_map must map names to files in this folder")
    if total_size is not None and type(total_size) is not int:
        raise refused(path, "index", f"total_size is {total_size!r}, not a number of bytes")
    return dict(weight_map), total_size


def _compare_index(
    path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, tuple[Path, StoredTensor]]
) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise refused(path, "missing", f"{name} is in the index, but not in {file}")
        if tensors[name][0].name != file:
            raise refused(path, "misplaced", f"{name} is in {tensors[name][0].name}, not {file}")
    if surplus := sorted(tensors.keys() - weight_map.keys()):
        raise refused(path, "extra", f"not in the index: {', '.join(surplus[:MAX_NAMED])}")


def _format_of(folder: Path, tensors: Mapping[str, tuple[Path, StoredTensor]]) -> ExpertFormat:
    found: set[ExpertFormat] = set()
    by_dtype = {"BF16": ExpertFormat.BF16, "F32": ExpertFormat.FP32}
    for name, (_, stored) in tensors.items():
        if ".experts." in name:
            if name.endswith((".weight_packed", ".weight_scale")):
                found.add(ExpertFormat.MXFP4)
            elif stored.spec.dtype in by_dtype:
                found.add(by_dtype[stored.spec.dtype])
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise refused(folder, "format", f"routed experts must have one format, found {names}")
    return found.pop()


def _compare(
    folder: Path, model: ModelConfig, experts: ExpertFormat, found: Mapping[str, TensorSpec]
) -> None:
    asked = num_routed(model.text_config)
    if asked > len(found):
        raise refused(
            folder, "missing",
            f"the config asks for {asked} tensors of experts alone, {len(found)} are there",
        )  # fmt: skip
    try:
        wanted = {s.name: s for shard in release_shards(model, experts) for s in shard.tensors}
    except ConfigError as error:
        raise refused(folder, "config", error.message) from error
    if absent := sorted(wanted.keys() - found.keys()):
        some = ", ".join(absent[:MAX_NAMED])
        raise refused(folder, "missing", f"{len(absent)} tensors that the config asks for: {some}")
    if surplus := sorted(found.keys() - wanted.keys()):
        some = ", ".join(surplus[:MAX_NAMED])
        raise refused(folder, "extra", f"{len(surplus)} tensors unknown to the config: {some}")
    for name, spec in wanted.items():
        if found[name].shape != spec.shape:
            reason = f"{name} is {list(found[name].shape)}, the config says {list(spec.shape)}"
            raise refused(folder, "shape", reason)
        if found[name].dtype != spec.dtype:
            reason = f"{name} is {found[name].dtype}, the layout says {spec.dtype}"
            raise refused(folder, "dtype", reason)
