"""`WeightVersion`: the immutable name of a published set of weights. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WeightVersion:
    """A version exists when all of it exists: (line, optimizer step, digest of its manifest)."""

    line: str
    step: int
    digest: str

    def __str__(self) -> str:
        return f"{self.line}@{self.step}-{self.digest[:12]}"
