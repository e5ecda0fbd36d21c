"""Which files there are: `list_sources` over folders, globs, files and the word "python".

"python" is the running installation: the standard library (each top-level module is a package),
site-packages, and pydoc's topics and built-in modules. A document's id and package never depend on
where the installation lies. Left out: test suites (tables of data), `*.dist-info` (licences), and
vendored copies, which would put one package's text under another's name.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3ray.curate.pydoc_texts import PYDOC_SCHEME, pydoc_names, pydoc_text
from k3ray.errors import DataError

PYTHON = "python"
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "test", "tests", "testing", "idle_test", "lib2to3",
     "_vendor", "_vendored", "vendored", "third_party", "thirdparty_files", "node_modules"}
)  # fmt: skip
_SKIPPED_SUFFIXES = (".dist-info", ".egg-info")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file that may become a document.

    Args:
        document: Id, the same on every machine with the same installation.
        path: Where to read it, or `pydoc:<name>`.
        package: What the held-out set is chosen by; lower case, `-` written `_`.
        size_bytes: At the time of listing.
    """

    document: str
    path: str
    package: str
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class Listing:
    """All files, ordered by document id, and the folders that could not be listed."""

    files: list[SourceFile] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def list_sources(sources: Sequence[str], extensions: Sequence[str]) -> Listing:
    """List regular files with one of the extensions; links to folders are not followed.

    Raises:
        DataError: a source does not exist or matches no file.
    """
    listing = Listing()
    labels: dict[str, int] = {}
    for source in sources:
        before = len(listing.files)
        for label, root, pattern in _roots(source):
            if label == PYDOC_SCHEME:
                listing.files += _pydoc_files()
                continue
            seen = labels[label] = labels.get(label, -1) + 1
            unique = label if not seen else f"{label}-{seen}"
            paths = _matching(root, pattern, listing) if pattern else _walk(root, listing)
            listing.files += _described(paths, root, unique, tuple(extensions))
        if len(listing.files) == before:
            raise DataError(
                f"source {source!r} matches no readable file ending in {', '.join(extensions)}",
                remedy="name an existing folder, file or glob, or the word 'python'",
                source=source,
            )
    listing.files.sort(key=lambda file: file.document)
    return listing


def _roots(source: str) -> Iterator[tuple[str, Path, str | None]]:
    """(label, root folder, glob below it or None) of one source."""
    if source == PYTHON:
        yield "stdlib", Path(sysconfig.get_paths()["stdlib"]), None
        yield "site", Path(sysconfig.get_paths()["purelib"]), None
        yield PYDOC_SCHEME, Path(), None
        return
    path = Path(source).absolute()
    if not glob.has_magic(source):
        single = path.is_file()
        yield (
            path.parent.name if single else path.name,
            path.parent if single else path,
            (str(path) if single else None),
        )
        return
    root = path
    while glob.has_magic(str(root)):
        root = root.parent
    yield root.name, root, str(path)


def _walk(root: Path, listing: Listing) -> Iterator[Path]:
    def failed(error: OSError) -> None:
        if Path(error.filename) != root:  # a missing root is the source's own error
            listing.unreadable.append(str(error.filename))

    for folder, below, names in os.walk(root, onerror=failed):
        below[:] = sorted(
            name
            for name in below
            if name not in _SKIPPED_FOLDERS and not name.endswith(_SKIPPED_SUFFIXES)
        )
        yield from (Path(folder, name) for name in names)


def _matching(root: Path, pattern: str, listing: Listing) -> Iterator[Path]:
    for name in glob.iglob(pattern, recursive=True):
        if os.path.isdir(name):
            yield from _walk(Path(name), listing)
        else:
            yield Path(name)


def _described(
    paths: Iterator[Path], root: Path, label: str, extensions: tuple[str, ...]
) -> Iterator[SourceFile]:
    for path in dict.fromkeys(paths):
        if path.suffix.lower() not in extensions:
            continue
        try:
            status = path.stat()
        except OSError:
            status = None  # vanished, or a dangling link: kept, so that reading records it
        if status is not None and not stat.S_ISREG(status.st_mode):
            continue
        relative = path.relative_to(root)
        top = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        yield SourceFile(
            document=f"{label}/{relative.as_posix()}".encode(errors="replace").decode(),
            path=str(path),
            package=top.lower().replace("-", "_"),
            size_bytes=status.st_size if status else 0,
        )


def _pydoc_files() -> Iterator[SourceFile]:
    for name in pydoc_names():
        yield SourceFile(
            document=f"pydoc/{name}",
            path=f"{PYDOC_SCHEME}:{name}",
            package=f"pydoc_{name.replace('/', '_').lower()}",
            size_bytes=len(pydoc_text(name).encode()),
        )
