"""`WeightVersion`: the immutable name of a published set of weights. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3ray.errors import StoreError

_TEXT = re.compile(r"^(?P<line>[a-z0-9][a-z0-9._-]*)@(?P<step>\d+)-(?P<digest>[0-9a-f]{12})$")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WeightVersion:
    """A version exists when all of it exists: (line, optimizer step, digest of its manifest)."""

    line: str
    step: int
    digest: str

    def __str__(self) -> str:
        return f"{self.line}@{self.step}-{self.digest[:12]}"

    @staticmethod
    def parse(text: str) -> WeightVersion:
        """Read `str(version)`; the digest is the 12 digits that the text carries.

        Raises:
            StoreError: the text is no version.
        """
        match = _TEXT.match(text)
        if match is None:
            raise StoreError(
                f"{text!r} is not a weight version",
                remedy="a version reads <line>@<step>-<12 hex digits>; see `k3ray status`",
                version=text,
            )
        return WeightVersion(line=match["line"], step=int(match["step"]), digest=match["digest"])
