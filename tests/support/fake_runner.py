"""A tiny deterministic model for engine tests: logits are a hash of all tokens so far.

It keeps its own record of what every slot and page holds, so that a span at a wrong start, a page
shared by two sequences or state that was not zeroed fails the test at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from k3ray.engine.runner import Logits, Work
from k3ray.errors import K3RayError

PAGE = 64


class FakeRunner:
    """Implements `ModelRunner`; `fail` may return an error (or "nan") for a call's work."""

    def __init__(self, *, vocab_size: int = 512, versions: tuple[str, ...] = ("v1",)) -> None:
        self.vocab_size = vocab_size
        self.live = versions
        self.slots: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.fail: Callable[[Work], K3RayError | str | None] = lambda work: None
        self.batches: list[list[Work]] = []

    def versions(self) -> tuple[str, ...]:
        return self.live

    def plan_version(self) -> int:
        return 7

    def zero(self, slot: int, pages: tuple[int, ...]) -> None:
        self.slots[slot] = []
        for page in pages:
            self.pages[page] = []

    def forward(self, works: Sequence[Work]) -> list[Logits | K3RayError]:
        assert len({work.slot for work in works}) == len(works)
        pages = [page for work in works for page in work.pages]
        assert len(set(pages)) == len(pages)
        self.batches.append(list(works))
        rows: list[Logits | K3RayError] = []
        for work in works:
            failure = self.fail(work)
            if isinstance(failure, K3RayError):
                # Half advanced: the state is now wrong on purpose.
                self.slots[work.slot].append(-1)
                rows.append(failure)
                continue
            row = self._advance(work)[-1]
            rows.append(np.full_like(row, np.nan) if failure == "nan" else row)
        return rows

    def score(self, work: Work) -> Logits:
        failure = self.fail(work)
        if isinstance(failure, K3RayError):
            raise failure
        return np.stack(self._advance(work))

    def _advance(self, work: Work) -> list[Logits]:
        state = self.slots[work.slot]
        assert len(state) == work.start, (len(state), work.start)
        rows = []
        for offset, token in enumerate(work.tokens):
            position = work.start + offset
            page = self.pages[work.pages[position // PAGE]]
            assert len(page) == position % PAGE
            page.append(token)
            state.append(token)
            rows.append(self.logits(work.version, state))
        paged = [t for page in work.pages for t in self.pages[page]]
        assert paged == state
        return rows

    def logits(self, version: str, tokens: Sequence[int]) -> Logits:
        """[V] float32 of the next token after `tokens`."""
        text = f"{version}:{','.join(map(str, tokens))}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        rng = np.random.Generator(np.random.Philox(key=seed))
        return (3.0 * rng.standard_normal(self.vocab_size)).astype(np.float32)
