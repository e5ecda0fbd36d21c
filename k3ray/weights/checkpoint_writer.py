"""Writing a checkpoint folder in the release's layout: all of it becomes visible at once, or none.

Everything is written and fsynced in a hidden folder beside the target, which is then renamed into
place; a target that is to be replaced is exchanged with it in one system call. A writer that dies
leaves the old state and a hidden folder, which the next writer removes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from k3ray.config.model import ModelConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.config.release_writer import release_json
from k3ray.errors import CheckpointError
from k3ray.weights.checkpoint import CONFIG_FILE, INDEX_FILE
from k3ray.weights.release_layout import (
    check_format,
    release_shards,
    total_bytes,
)
from k3ray.weights.safetensors_io import ReadBytes, write_file
from k3ray.weights.shard import sync, sync_directory

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Progress = Callable[[int, int], None]
"""Told (shards written, shards in all)."""


def write_checkpoint(
    out: Path,
    model: ModelConfig,
    experts: ExpertFormat,
    read: ReadBytes,
    *,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `config.json`, shards and index.

    Args:
        out: The folder to make.
        model: Decides which tensors there are.
        experts: How routed experts are stored.
        read: Gives each tensor's bytes when it is written; asked in the order of names.
        overwrite: Replace a folder that is there.
        progress: Called after every shard.

    Raises:
        CheckpointError: `kind` "exists" (and not `overwrite`) or "write" (disk full or failing);
            what was there before is untouched.
        ConfigError: the format does not suit the model.
    """
    out = out.absolute()
    check_format(model.text_config, experts)
    if out.exists() and not overwrite:
        raise CheckpointError(
            f"{out} exists", remedy="choose another folder or pass --overwrite", kind="exists",
            path=str(out),
        )  # fmt: skip
    hidden = f".{out.name}.k3ray-writing-"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staged = out.parent / f"{hidden}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        _sweep(out.parent, hidden)
        staged.mkdir()
        try:
            _write_all(staged, model, experts, read, progress)
            _show(staged, out)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint {out}: {error}",
            remedy="free disk space or choose another folder; nothing became visible",
            kind="write", path=str(out), errno=error.errno,
        ) from error  # fmt: skip


def _write_all(
    staged: Path,
    model: ModelConfig,
    experts: ExpertFormat,
    read: ReadBytes,
    progress: Progress,
) -> None:
    shards = release_shards(model, experts)
    for number, shard in enumerate(shards, start=1):
        write_file(staged / shard.file, shard.tensors, read, metadata={"format": "pt"})
        progress(number, len(shards))
    weight_map = {spec.name: shard.file for shard in shards for spec in shard.tensors}
    index = {
        "metadata": {"total_size": total_bytes(model, experts)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    packed = experts is ExpertFormat.MXFP4
    _write_json(staged / INDEX_FILE, index)
    _write_json(staged / CONFIG_FILE, release_json(model, packed_experts=packed))
    sync_directory(staged)


def _show(staged: Path, out: Path) -> None:
    if out.exists():
        _exchange(staged, out)  # `staged` is the old folder now
    else:
        staged.rename(out)
    sync_directory(out.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step (Linux `renameat2`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    if done != 0:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, "this file system cannot replace a folder atomically", str(other))
        raise OSError(code, os.strerror(code), str(other))


def _sweep(parent: Path, hidden: str) -> None:
    """Remove what writers of this target left that live no longer."""
    for left in parent.glob(f"{hidden}*"):
        pid = left.name.removeprefix(hidden).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _write_json(path: Path, document: object) -> None:
    with path.open("xb") as file:
        file.write(json.dumps(document, indent=2).encode() + b"\n")
        sync(file)
