"""Which documents the tokenizer is trained on: `choose_sample`, deterministic and stratified.

Packages give documents in turns, so the merges reflect all of them and not the largest; the order
within a package and of the packages is seeded. Only training documents are eligible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from k3ray.curate.hashing import seeded_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A living training document and where its text lies."""

    document: str
    package: str
    part: int
    text_bytes: int


def choose_sample(candidates: Iterable[Candidate], *, seed: int, max_bytes: int) -> list[Candidate]:
    """Documents of at most `max_bytes` together, ordered by document id; at least one."""
    of_package: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        of_package[candidate.package].append(candidate)
    turns: list[tuple[int, int, Candidate]] = []
    for package, members in of_package.items():
        members.sort(key=lambda item: (seeded_hash(seed, "sample", item.document), item.document))
        rank = seeded_hash(seed, "sample-package", package)
        turns += [(turn, rank, item) for turn, item in enumerate(members)]
    chosen: list[Candidate] = []
    total = 0
    for _, _, item in sorted(turns, key=lambda entry: (*entry[:2], entry[2].document)):
        if not chosen or total + item.text_bytes <= max_bytes:
            chosen.append(item)
            total += item.text_bytes
    return sorted(chosen, key=lambda item: item.document)
