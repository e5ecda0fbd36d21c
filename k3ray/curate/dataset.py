"""From finished parts to a data set: identity, exclusive use of a folder, and the manifest.

Everything is built in `.work` inside the folder and moved into place at the end; `manifest.json`
comes last, so a folder without it holds no data set, whatever else lies there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from k3ray.config.jobs import CurateConfig
from k3ray.curate.report import DocumentFact, split_totals
from k3ray.curate.storage import file_sha256, write_json
from k3ray.errors import DataError
from k3ray.model.packed_data import (
    FORMAT,
    HELDOUT,
    MANIFEST,
    TRAIN,
    PackedDataset,
    read_manifest,
)

WORK: Final = ".work"
TOKENIZER_FILE: Final = "tokenizer/tokenizer.json"
REPORT: Final = "report.json"
_LOCK = ".lock"
_BYTES_NEEDED_PER_INPUT_BYTE = 4


def config_identity(config: CurateConfig) -> str:
    """SHA-256 of what the result depends on: all of the config but the folder and the workers."""
    values = config.model_dump(mode="json", exclude={"out_dir", "num_workers"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def code_identity() -> str:
    """SHA-256 over the sources of the rules and the tokenizer."""
    package = Path(__file__).parents[1]
    files = sorted([*(package / "curate").glob("*.py"), *(package / "text").glob("*.py")])
    joined = "".join(f"{path.name}:{file_sha256(path)}\n" for path in files)
    return hashlib.sha256(joined.encode()).hexdigest()


def inputs_identity(facts: Iterable[DocumentFact]) -> str:
    """SHA-256 over every selected document and what was in it (or why it was dropped)."""
    lines = sorted(f"{fact.document}\0{fact.fingerprint or fact.reason}" for fact in facts)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()


def existing_dataset(config: CurateConfig) -> dict[str, Any] | None:
    """The manifest of the data set that is already there; None when there is none.

    Raises:
        DataError: it came from another configuration, or it is damaged.
    """
    root = Path(config.out_dir)
    manifest = read_manifest(root)
    if manifest is None:
        return None
    if manifest["config_digest"] != config_identity(config):
        raise DataError(
            f"{root} holds a data set of another configuration",
            remedy="choose another out_dir, or delete that folder",
            path=str(root), found=manifest["config_digest"],
        )  # fmt: skip
    for split in (TRAIN, HELDOUT):
        PackedDataset.open(root, split=split)
    return manifest


@contextmanager
def exclusive_folder(root: Path, *, input_bytes: int) -> Iterator[Path]:
    """An empty work folder in `root` that nobody else uses; removed at the end.

    Raises:
        DataError: another curation works there, or there is too little disk space.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DataError(
            f"cannot use {root}: {error.strerror}", remedy="choose a folder you can write to"
        ) from error
    work = root / WORK
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another curation is writing to {root}",
                remedy="wait for it, or choose another out_dir", path=str(root),
            ) from error  # fmt: skip
        check_space(root, needed=_BYTES_NEEDED_PER_INPUT_BYTE * input_bytes)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def check_space(root: Path, *, needed: int) -> None:
    """Raise `DataError` when the disk has fewer than `needed` bytes free."""
    free = shutil.disk_usage(root).free
    if free < needed:
        raise DataError(
            f"{root} has {free >> 20} MiB free, the curation may need {needed >> 20} MiB",
            remedy="free disk space, choose another out_dir, or lower max_total_bytes",
            free_bytes=free, needed_bytes=needed,
        )  # fmt: skip


def finish_dataset(
    work: Path,
    config: CurateConfig,
    *,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Mapping[str, Any],
    inputs: Mapping[str, Any],
    report: Mapping[str, Any],
) -> dict[str, Any]:
    """Move the shards into place and write report and manifest; returns the manifest.

    Args:
        work: The work folder; shards lie in `work/packed`, the tokenizer in `work/tokenizer`.
        config: What was asked for.
        rows: Facts of all shards (rows of `pack_part.PACKED`).
        tokenizer: The manifest's entry for the tokenizer.
        inputs: The manifest's entry for the inputs.
        report: Contents of `report.json`.

    Raises:
        DataError: not one full training sequence, or the disk is full.
    """
    root = Path(config.out_dir)
    for name in (TRAIN, HELDOUT, "tokenizer"):
        shutil.rmtree(root / name, ignore_errors=True)  # left by a run that never finished
    splits = {split: _place_split(root, work, rows, split) for split in (TRAIN, HELDOUT)}
    if not splits[TRAIN]["num_sequences"]:
        raise DataError(
            f"the sources give {splits[TRAIN]['num_tokens']} training tokens, fewer than one "
            f"sequence of {config.sequence_length}",
            remedy="add sources, loosen the filters or lower sequence_length",
        )
    (work / "tokenizer").replace(root / "tokenizer")
    write_json(root / REPORT, report)
    outputs = [tokenizer["sha256"]] + [
        shard["sha256"] for split in splits.values() for shard in split["shards"]
    ]
    manifest = {
        "format": FORMAT,
        "sequence_length": config.sequence_length,
        "digest": hashlib.sha256("\n".join(outputs).encode()).hexdigest(),
        "config_digest": config_identity(config),
        "config": config.model_dump(mode="json", exclude={"out_dir", "num_workers"}),
        "code": {"k3ray": importlib.metadata.version("k3ray"), "sha256": code_identity()},
        "inputs": dict(inputs),
        "tokenizer": dict(tokenizer),
        "splits": splits,
        "report": {"file": REPORT, "sha256": file_sha256(root / REPORT)},
    }
    write_json(root / MANIFEST, manifest)
    return manifest


def _place_split(
    root: Path, work: Path, rows: Sequence[Mapping[str, Any]], split: str
) -> dict[str, Any]:
    (root / split).mkdir()
    shards: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: int(row["part"])):
        if row["split"] != split or not row["num_sequences"]:
            continue
        name = f"{split}/shard-{len(shards):05d}.arrow"
        (work / "packed" / row["file"]).replace(root / name)
        shards.append(
            {"file": name, **{key: row[key] for key in ("sha256", "size_bytes", "num_sequences")}}
        )
    _sync_folder(root / split)
    return {**split_totals(rows, split), "shards": shards}


def _sync_folder(path: Path) -> None:
    """Make the renames in a folder durable before the manifest speaks of them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
