"""Looks for bytes in the memory of another process of this user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

_CHUNK_BYTES = 1 << 24


def count_found(pid: int, needles: Sequence[bytes]) -> int:
    """How many of `needles` lie somewhere in the writable memory of `pid`."""
    found: set[bytes] = set()
    overlap = max(map(len, needles))
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, stop in _writable(pid):
            for at in range(start, stop, _CHUNK_BYTES):
                try:
                    memory.seek(at)
                    piece = memory.read(min(_CHUNK_BYTES + overlap, stop - at))
                except OSError:  # unmapped since
                    continue
                found.update(needle for needle in needles if needle in piece)
    return len(found)


def _writable(pid: int) -> Iterator[tuple[int, int]]:
    """Address ranges of writable mappings of which anything is in memory."""
    start = stop = 0
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start, stop = (int(part, 16) for part in words[0].split("-"))
            writable = "w" in words[1]
        elif words[0] == "Rss:" and writable and words[1] != "0":
            yield start, stop
