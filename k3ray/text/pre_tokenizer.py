"""How text is cut before byte-pair merging: K3's pattern, and the release's cut of very long input.

No merge crosses a piece of the pattern. Very long texts are first cut every 400,000 characters and
after 25,000 characters of one kind (space or not), which bounds the work on pathological input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

MAX_CHARS: Final = 400_000
MAX_RUN_CHARS: Final = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

PATTERN: Final = "|".join((
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip
"""Oniguruma syntax; alternatives in the release's order."""

_RUN = re.compile(r"\s+|\S+")


def cut_long(text: str) -> Iterator[str]:
    """Pieces of `text`, in order, that are encoded on their own; linear in the text.

    >>> list(cut_long("short"))
    ['short']
    """
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    for start in range(0, len(text), MAX_CHARS):
        yield from _cut_runs(text[start : start + MAX_CHARS])


def _cut_runs(text: str) -> Iterator[str]:
    begin = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            yield text[begin:cut]
            begin = cut
    yield text[begin:]
