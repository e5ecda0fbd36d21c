"""Writing a checkpoint folder in the release's layout: all of it becomes visible at once, or none.

Everything is written and fsynced in a hidden folder beside the target, which is then renamed into
place; a target that is to be replaced is exchanged with it in one system call, and one that is not
is never replaced, even if it appeared meanwhile. A writer that dies leaves the old state and a
hidden folder, which the next writer removes: a writer holds a lock on its folder while it lives.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3ray.config.model import ModelConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.config.release_writer import release_json, with_kept_keys
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
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_NO_SUCH_RENAME = (errno.EINVAL, errno.ENOSYS)
_IS_CHECKPOINT = frozenset({CONFIG_FILE, INDEX_FILE})
"""Files by which a folder is known to be a checkpoint, one that may be replaced."""

Progress = Callable[[int, int], None]
"""Told (shards written, shards in all)."""


def write_checkpoint(
    out: Path,
    model: ModelConfig,
    experts: ExpertFormat,
    read: ReadBytes,
    *,
    overwrite: bool = False,
    extras: Sequence[Path] = (),
    keep: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `config.json`, shards and index.

    Args:
        out: The folder to make.
        model: Decides which tensors there are.
        experts: How routed experts are stored.
        read: Gives each tensor's bytes when it is written; asked in the order of names.
        overwrite: Replace a checkpoint (or an empty folder) that is there.
        extras: Other files to copy, the tokenizer say.
        keep: A `config.json` whose other keys are kept.
        progress: Called after every shard.

    Raises:
        CheckpointError: `kind` "exists" (and not `overwrite`, or it is no checkpoint) or "write"
            (disk full or failing); what was there before is untouched.
        ConfigError: the format does not suit the model.
    """
    out = out.absolute()
    check_format(model.text_config, experts)
    hidden = f".{out.name}.k3ray-writing-"
    try:
        _check_target(out, overwrite=overwrite)
        out.parent.mkdir(parents=True, exist_ok=True)
        with _staged(out.parent, hidden) as staged:
            _write_all(staged, model, experts, read, progress)
            document = release_json(model, packed_experts=experts is ExpertFormat.MXFP4)
            _write_json(staged / CONFIG_FILE, with_kept_keys(document, keep or {}))
            for extra in extras:
                _copy(extra, staged / extra.name)
            sync_directory(staged)
            _check_target(out, overwrite=overwrite)
            _show(staged, out, overwrite=overwrite)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise CheckpointError(
            f"cannot write checkpoint {out}: {error}",
            remedy=f"{'free disk space or ' if full else ''}choose another folder; nothing became "
            "visible",
            kind="write", path=str(out), errno=error.errno,
        ) from error  # fmt: skip


def _check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse a target that is there, unless it is a checkpoint (or empty) and to be replaced."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise _exists(out)
    if out.is_symlink() or not out.is_dir():
        raise _exists(out, "and is no folder")
    names = {child.name for child in out.iterdir()}
    if names and not names & _IS_CHECKPOINT:
        raise _exists(out, "and is no checkpoint: it is not replaced")


def _exists(out: Path, why: str = "") -> CheckpointError:
    return CheckpointError(
        f"{out} exists {why}".rstrip(),
        remedy="choose another folder" + ("" if why else " or pass --overwrite"),
        kind="exists", path=str(out),
    )  # fmt: skip


@contextmanager
def _staged(parent: Path, hidden: str) -> Iterator[Path]:
    """A hidden folder to write into, locked as long as this process lives; gone afterwards."""
    staged = parent / f"{hidden}{uuid.uuid4().hex[:12]}"
    with _locked(parent):  # so that nobody sweeps a folder between its making and its lock
        _sweep(parent, hidden)
        staged.mkdir()
        lock = os.open(staged, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        os.close(lock)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock for a moment; other writers of it wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer)
        sync(writer)


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
    _write_json(staged / INDEX_FILE, index)


def _show(staged: Path, out: Path, *, overwrite: bool) -> None:
    if overwrite and out.exists():
        _rename(staged, out, _RENAME_EXCHANGE)  # `staged` is the old folder now
    else:
        try:
            _rename(staged, out, _RENAME_NOREPLACE)
        except OSError as error:
            if error.errno in _NO_SUCH_RENAME and not os.path.lexists(out):
                staged.rename(out)  # of folders: fails by itself where something is inside
            elif error.errno in (errno.EEXIST, *_NO_SUCH_RENAME):
                raise _exists(out, "now: somebody made it meanwhile") from None
            else:
                raise
    sync_directory(out.parent)


def _rename(one: Path, other: Path, flag: int) -> None:
    """Rename in one step, never replacing, or swap two folders (Linux `renameat2`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flag)
    if done != 0:
        code = ctypes.get_errno()
        if code in _NO_SUCH_RENAME:
            raise OSError(
                code, "this file system cannot put a folder in place atomically", str(other)
            )
        raise OSError(code, os.strerror(code), str(other))


def _sweep(parent: Path, hidden: str) -> None:
    """Remove what writers of this target left that live no longer, on any host: whose lock is
    free. What cannot be locked here is left alone."""
    for left in parent.iterdir():
        if not left.name.startswith(hidden) or left.is_symlink() or not left.is_dir():
            continue
        try:
            lock = os.open(left, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _write_json(path: Path, document: object) -> None:
    with path.open("xb") as file:
        file.write(json.dumps(document, indent=2).encode() + b"\n")
        sync(file)
