"""The journal: append-only, one CRC-guarded line per record, fsynced before `append` returns.

A line is `<crc32 as 8 hex> <json>`; the first one is a header with the format. Opening takes the
next controller term by creating `terms/<term>` exclusively, cuts a torn tail (a crash in the middle
of a write) and says so; damage before the tail is an error, never skipped. A writer whose term has
been passed is refused at its next append.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from k3ray.control.records import Record, decode, encode
from k3ray.errors import FencedError, JournalError

FORMAT = 1
_HEADER = json.dumps({"journal": "k3ray", "format": FORMAT})


@dataclass(frozen=True, slots=True, kw_only=True)
class TornTail:
    """What opening cut off: an unfinished last write."""

    offset: int
    size_bytes: int


class Journal:
    """An open journal, held by the controller of `term`. Make one with `Journal.open`."""

    def __init__(self, path: Path, term: int) -> None:
        self.path = path
        self.term = term
        self.records: tuple[Record, ...] = ()
        self.torn: TornTail | None = None
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    @staticmethod
    def open(path: Path) -> Journal:
        """Take the next term, read all records, cut a torn tail.

        Raises:
            JournalError: another controller took the same term at the same moment, the file is
                damaged before its tail, or the disk fails.
        """
        try:
            _terms(path).mkdir(parents=True, exist_ok=True)
            term = latest_term(path) + 1
            _take_term(path, term)
            journal = Journal(path, term)
            with journal._locked():
                journal._recover()
            _sync_directory(path.parent)
        except OSError as error:
            raise _failed(path, "open", error) from error
        return journal

    def append(self, record: Record) -> None:
        """Write one record; it is on the disk when this returns.

        Raises:
            FencedError: a later controller has taken over; nothing was written.
            JournalError: the disk is full or failing; nothing remains of the record.
        """
        line = _line(encode(record))
        try:
            with self._locked():
                self._require_term()
                size = os.fstat(self._handle).st_size
                try:
                    _write_all(self._handle, line)
                    os.fsync(self._handle)
                except OSError:
                    os.ftruncate(self._handle, size)
                    raise
        except OSError as error:
            raise _failed(self.path, "append to", error) from error

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _require_term(self) -> None:
        current = latest_term(self.path)
        if current > self.term:
            raise FencedError(
                f"controller term {self.term} is over, term {current} has the journal",
                remedy="this controller was replaced; it must exit",
                who="controller",
                offered=self.term,
                seen=current,
            )

    def _recover(self) -> None:
        data = self.path.read_bytes()
        texts, good = _valid_prefix(data, self.path)
        if good < len(data):
            self.torn = TornTail(offset=good, size_bytes=len(data) - good)
            os.ftruncate(self._handle, good)
            os.fsync(self._handle)
        if not texts:
            _write_all(self._handle, _line(_HEADER))
            os.fsync(self._handle)
            return
        header = json.loads(texts[0])
        if header.get("format") != FORMAT:
            raise JournalError(
                f"{self.path} has format {header.get('format')}, this code reads {FORMAT}",
                remedy="run the k3ray version that wrote it, or move the journal away",
            )
        self.records = tuple(decode(text) for text in texts[1:])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclusive for the moment of one append or recovery, so that the term check holds."""
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)


def latest_term(path: Path) -> int:
    """The highest controller term ever taken on this journal; 0 when none was."""
    folder = _terms(path)
    return max((int(entry.name) for entry in folder.iterdir()), default=0) if folder.is_dir() else 0


def read_records(path: Path) -> tuple[Record, ...]:
    """Records of a journal, without taking a term or changing the file (for tools and tests).

    Raises:
        JournalError: damaged before its tail.
    """
    texts, _ = _valid_prefix(path.read_bytes(), path)
    return tuple(decode(text) for text in texts[1:])


def _terms(path: Path) -> Path:
    return path.with_name(path.name + ".terms")


def _take_term(path: Path, term: int) -> None:
    try:
        handle = os.open(_terms(path) / f"{term:08d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError as error:
        raise JournalError(
            f"another controller took term {term} of {path} at the same moment",
            remedy="only one controller may run: connect to the other one",
            term=term,
        ) from error
    os.write(handle, f"{os.getpid()}\n".encode())
    os.fsync(handle)
    os.close(handle)
    _sync_directory(_terms(path))


def _line(text: str) -> bytes:
    data = text.encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _valid_prefix(data: bytes, path: Path) -> tuple[list[str], int]:
    """JSON texts of the whole lines at the start, and where the first broken one begins."""
    texts: list[str] = []
    position = 0
    while position < len(data):
        end = data.find(b"\n", position)
        text = _checked(data[position:end]) if end >= 0 else None
        if text is None:
            _require_tail(data, position, path)
            break
        texts.append(text)
        position = end + 1
    return texts, position


def _require_tail(data: bytes, position: int, path: Path) -> None:
    """A broken line followed by a whole one is damage, not an unfinished write."""
    if any(_checked(line) is not None for line in data[position:].split(b"\n")[1:]):
        raise JournalError(
            f"{path} is damaged at byte {position}, whole records follow",
            remedy="restore the journal from a copy; it was changed by something else",
            offset=position,
        )


def _checked(line: bytes) -> str | None:
    if len(line) < 9 or line[8:9] != b" ":
        return None
    if line[:8] != b"%08x" % zlib.crc32(line[9:]):
        return None
    return line[9:].decode()


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failed(path: Path, what: str, error: OSError) -> JournalError:
    return JournalError(
        f"cannot {what} the journal {path}: {error}",
        remedy="free disk space or point journal_file elsewhere",
        path=str(path),
        errno=error.errno,
    )
