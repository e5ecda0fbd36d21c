"""`WeightStore`: entries of lines on disk: `<root>/<line>/<kind>-<step>-<digest>/`.

An entry is staged under `<root>/<line>/.staging/`, its shards are written by any number of
processes, then `commit` writes the manifest and renames the folder: the entry is visible only
when all of it exists. What crashed on the way stays in `.staging` and is never read. No torch.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3ray.errors import StoreError
from k3ray.weights.manifest import EntryKind, Manifest, Meta, ShardInfo, content_digest
from k3ray.weights.shard import Array, read_tensors, sync, sync_directory, write_shard_file
from k3ray.weights.version import WeightVersion

_LINE = re.compile(r"^[a-z0-9][a-z0-9._-]*$")
_ENTRY = re.compile(r"^(version|checkpoint)-(\d{8,})-([0-9a-f]{12})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedEntry:
    """An entry in the making; a plain value that travels to the processes that write shards."""

    line: str
    kind: EntryKind
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEntry:
    """A whole, committed entry."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """Name of the entry's folder."""
        return self.path.name

    @property
    def version(self) -> WeightVersion:
        """The version (or checkpoint) that the entry holds."""
        return self.manifest.version

    def names(self) -> tuple[str, ...]:
        """All tensor names, ascending."""
        return tuple(sorted(self.manifest.tensors()))

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Read tensors by name into fresh, writable arrays.

        Raises:
            StoreError: a name is unknown, or bytes do not match their digest.
        """
        where = self.manifest.tensors()
        by_shard: dict[str, list[str]] = {}
        for name in names:
            if name not in where:
                raise StoreError(
                    f"entry {self.name} has no tensor {name}",
                    remedy="the entry was written by another model config",
                    entry=self.name,
                    tensor=name,
                )
            by_shard.setdefault(where[name][0].name, []).append(name)
        result: dict[str, Array] = {}
        for shard, wanted in by_shard.items():
            infos = [where[name][1] for name in wanted]
            result.update(read_tensors(_shard_path(self.path, shard), infos))
        return result

    def require_model(self, digest: str) -> None:
        """Raise `StoreError` when the entry says that another model config wrote it."""
        written_by = self.manifest.meta.get("model")
        if written_by is not None and written_by != digest:
            raise StoreError(
                f"{self.version} was written by another model config ({str(written_by)[:12]}, "
                f"wanted {digest[:12]})",
                remedy="use the preset it was trained with, another line, or another K3RAY_HOME",
                version=str(self.version),
            )

    def verify(self) -> None:
        """Read everything once; raises `StoreError` at the first damaged tensor."""
        for shard in self.manifest.shards:
            for info in shard.tensors:
                read_tensors(_shard_path(self.path, shard.name), (info,))


class WeightStore:
    """The store under one root folder; stateless, so any process may open its own."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def stage(self, line: str, kind: EntryKind | str, step: int) -> StagedEntry:
        """Begin an entry.

        Raises:
            StoreError: bad line name, or the folder cannot be made.
        """
        kind = EntryKind(kind)
        folder = self._line_dir(line) / ".staging" / f"{kind}-{step:08d}-{secrets.token_hex(6)}"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        return StagedEntry(line=line, kind=kind, step=step, path=str(folder))

    def write_shard(
        self, staged: StagedEntry, name: str, tensors: Mapping[str, Array]
    ) -> ShardInfo:
        """Write one shard; different shards may be written by different processes at once.

        Raises:
            StoreError: disk full or failing, unknown dtype, or the staged entry is gone.
        """
        return write_shard_file(_shard_path(Path(staged.path), name), name, tensors)

    def commit(
        self, staged: StagedEntry, shards: Sequence[ShardInfo], meta: Meta | None = None
    ) -> WeightVersion:
        """Make the entry visible, atomically. Committing equal content again is a no-op.

        Raises:
            StoreError: a shard is missing or short, a tensor is doubled, or the disk is full;
                nothing became visible.
        """
        folder = Path(staged.path)
        for shard in shards:
            _require_size(_shard_path(folder, shard.name), shard.size_bytes)
        manifest = Manifest(
            kind=staged.kind,
            line=staged.line,
            step=staged.step,
            digest=content_digest(shards),
            created_unix_s=time.time(),
            shards=tuple(sorted(shards, key=lambda shard: shard.name)),
            meta=dict(meta or {}),
        )
        target = self._line_dir(staged.line) / _entry_name(staged.kind, manifest.version)
        if (target / "manifest.json").exists():
            self.discard(staged)
            return manifest.version
        try:
            _write_text(folder / "manifest.json", manifest.to_json())
            folder.rename(target)
            sync_directory(target.parent)
        except OSError as error:
            raise _cannot_write(target, error) from error
        return manifest.version

    def discard(self, staged: StagedEntry) -> None:
        """Drop a staged entry; idempotent."""
        shutil.rmtree(staged.path, ignore_errors=True)

    def entries(self, line: str, kind: EntryKind | str | None = None) -> tuple[StoreEntry, ...]:
        """Whole entries of `line`, oldest step first; damaged ones are left out.

        Use `damaged` to see which ones were passed over and why.
        """
        wanted = EntryKind(kind) if kind is not None else None
        found = []
        for folder in self._entry_dirs(line):
            try:
                entry = _load(folder)
            except StoreError:
                continue  # reported by `damaged`; a bad newest entry must not hide older ones
            if wanted is None or entry.manifest.kind is wanted:
                found.append(entry)
        return tuple(
            sorted(found, key=lambda e: (e.manifest.step, e.manifest.created_unix_s, e.name))
        )

    def damaged(self, line: str) -> dict[str, str]:
        """Entry folders that cannot be read as whole, each with the reason."""
        reasons = {}
        for folder in self._entry_dirs(line):
            try:
                _load(folder)
            except StoreError as error:
                reasons[folder.name] = error.message
        return reasons

    def latest(self, line: str, kind: EntryKind | str = EntryKind.VERSION) -> StoreEntry | None:
        """The whole entry of the highest step, or None."""
        entries = self.entries(line, kind)
        return entries[-1] if entries else None

    def open(
        self,
        line: str,
        entry: str | WeightVersion,
        kind: EntryKind | str = EntryKind.VERSION,
    ) -> StoreEntry:
        """Open an entry by folder name, by `WeightVersion` or by a version's text.

        Args:
            line: The line.
            entry: "version-00000003-<12 hex>", a `WeightVersion`, or its text.
            kind: Which kind a version means (a checkpoint may share its step).

        Raises:
            StoreError: missing or damaged.
        """
        name = str(entry)
        if not _ENTRY.match(name):
            name = _entry_name(EntryKind(kind), WeightVersion.parse(name))
        return _load(self._line_dir(line) / name)

    def delete(self, line: str, entry: str | WeightVersion) -> None:
        """Remove an entry: it is invisible at once, its bytes go after that; idempotent."""
        name = str(entry)
        if not _ENTRY.match(name):
            name = _entry_name(EntryKind.VERSION, WeightVersion.parse(name))
        folder = self._line_dir(line) / name
        grave = self._line_dir(line) / ".staging" / f"deleted-{secrets.token_hex(6)}"
        grave.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.rename(grave)
        except FileNotFoundError:
            return
        shutil.rmtree(grave, ignore_errors=True)

    def sweep(self, line: str, *, older_than_s: float) -> int:
        """Remove what crashed writers left in `.staging`; returns how many folders."""
        staging = self._line_dir(line) / ".staging"
        limit = time.time() - older_than_s
        old = [folder for folder in _subdirs(staging) if folder.stat().st_mtime < limit]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return len(old)

    def _line_dir(self, line: str) -> Path:
        if not _LINE.match(line):
            raise StoreError(
                f"{line!r} is not a line name",
                remedy="use lower-case letters, digits, '.', '_' and '-'",
                line=line,
            )
        return self.root / line

    def _entry_dirs(self, line: str) -> list[Path]:
        return [folder for folder in _subdirs(self._line_dir(line)) if _ENTRY.match(folder.name)]


def _entry_name(kind: EntryKind, version: WeightVersion) -> str:
    return f"{kind}-{version.step:08d}-{version.digest[:12]}"


def _shard_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _subdirs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(child for child in folder.iterdir() if child.is_dir())


def _load(folder: Path) -> StoreEntry:
    path = folder / "manifest.json"
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"no readable entry {folder}: {error}",
            remedy="see `k3ray status` for the versions that exist",
            path=str(folder),
        ) from error
    if _entry_name(manifest.kind, manifest.version) != folder.name:
        raise StoreError(
            f"entry {folder} holds {_entry_name(manifest.kind, manifest.version)}",
            remedy="entries must not be renamed; delete it",
            path=str(folder),
        )
    for shard in manifest.shards:
        _require_size(_shard_path(folder, shard.name), shard.size_bytes)
    return StoreEntry(path=folder, manifest=manifest)


def _require_size(path: Path, size_bytes: int) -> None:
    actual = path.stat().st_size if path.is_file() else -1
    if actual != size_bytes:
        raise StoreError(
            f"shard {path} has {actual} bytes, {size_bytes} were written",
            remedy="the entry is incomplete; use an older one",
            path=str(path),
        )


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(text.encode())
        sync(file)
    temporary.replace(path)
    sync_directory(path.parent)


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write store entry {path}: {error}",
        remedy="free disk space or point store_dir elsewhere; nothing became visible",
        path=str(path),
        errno=error.errno,
    )
