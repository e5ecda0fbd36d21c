"""What is curated and in which units: the byte budget, held-out packages, and parts.

All of it is decided from the listing before anything is read, so it cannot depend on timing or on
the number of workers. A part holds documents of one split; its sequences never mix with another's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3ray.curate.hashing import seeded_fraction, seeded_hash
from k3ray.curate.sources import SourceFile
from k3ray.model.packed_data import HELDOUT, TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Documents that one task reads and packs together, in this order."""

    index: int
    split: str
    files: tuple[SourceFile, ...]


def select_files(
    files: Iterable[SourceFile], *, seed: int, max_total_bytes: int
) -> list[SourceFile]:
    """Files in seeded order, as many as the budget allows, every package getting an equal share.

    Packages fill up together like vessels: small ones come whole, large ones give what is left.

    Args:
        files: What was listed.
        seed: Of the order.
        max_total_bytes: Bound of all sizes together.
    """
    level: dict[str, int] = defaultdict(int)
    queue: list[tuple[int, tuple[int, str], SourceFile]] = []
    for file in sorted(files, key=lambda file: _order(file, seed)):
        level[file.package] += file.size_bytes
        queue.append((level[file.package], _order(file, seed), file))
    chosen: list[SourceFile] = []
    total = 0
    for _, _, file in sorted(queue, key=lambda entry: entry[:2]):
        if total + file.size_bytes <= max_total_bytes:
            chosen.append(file)
            total += file.size_bytes
    return sorted(chosen, key=lambda file: _order(file, seed))


def split_of(package: str, *, seed: int, heldout_fraction: float) -> str:
    """Held out or not, by the package's name alone: no package is ever in both."""
    drawn = seeded_fraction(seed, "split", package)
    return HELDOUT if drawn < heldout_fraction else TRAIN


def make_parts(
    files: Sequence[SourceFile], *, seed: int, heldout_fraction: float, part_bytes: int
) -> list[Part]:
    """Cut the files, in their order, into parts of about `part_bytes`; training parts first."""
    parts: list[Part] = []
    for split in (TRAIN, HELDOUT):
        members: list[SourceFile] = []
        size = 0
        for file in files:
            if split_of(file.package, seed=seed, heldout_fraction=heldout_fraction) != split:
                continue
            if members and size + file.size_bytes > part_bytes:
                parts.append(Part(index=len(parts), split=split, files=tuple(members)))
                members, size = [], 0
            members.append(file)
            size += file.size_bytes
        if members:
            parts.append(Part(index=len(parts), split=split, files=tuple(members)))
    return parts


def _order(file: SourceFile, seed: int) -> tuple[int, str]:
    return seeded_hash(seed, "order", file.document), file.document
