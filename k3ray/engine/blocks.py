"""Allocators of sequence state: KDA slots and MLA pages of 64 tokens.

Only ids live here; the tensors are the runner's. Invariants: an id is free, held or quarantined,
never two of them; what is handed out has been zeroed first; what a NaN touched leaves service
until it has been zeroed again by `scrub`. Entry point: `StatePool`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PAGE_TOKENS = 64

ZeroFn = Callable[[int, tuple[int, ...]], None]
"""Zeroes the state of (slot, pages)."""


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens.

    >>> [pages_for(n) for n in (0, 1, 64, 65)]
    [0, 1, 1, 2]
    """
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one sequence holds: a KDA slot, and pages in the order of their positions."""

    slot: int
    pages: tuple[int, ...]


class StatePool:
    """Free slots and pages of one stack.

    Args:
        num_slots: KDA state slots.
        num_pages: MLA pages.
        zero: Called with every holding before it is handed out, and by `scrub`.
    """

    def __init__(self, *, num_slots: int, num_pages: int, zero: ZeroFn) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self._zero = zero
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()
        self._quarantined: list[Holding] = []

    @property
    def free_slots(self) -> int:
        """Slots that can be handed out now."""
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free_pages)

    @property
    def quarantined_pages(self) -> int:
        """Pages out of service after a NaN."""
        return sum(len(holding.pages) for holding in self._quarantined)

    def fits(self, num_pages: int) -> bool:
        """Whether a slot and `num_pages` pages are free."""
        return bool(self._free_slots) and num_pages <= len(self._free_pages)

    def allocate(self, num_pages: int) -> Holding:
        """Take a slot and pages, zeroed. The caller has asked `fits`."""
        assert self.fits(num_pages), "allocate without fits"
        cut = len(self._free_pages) - num_pages
        pages = tuple(reversed(self._free_pages[cut:]))
        del self._free_pages[cut:]
        holding = Holding(slot=self._free_slots.pop(), pages=pages)
        self._held.add(holding.slot)
        self._zero(holding.slot, holding.pages)
        return holding

    def release(self, holding: Holding) -> None:
        """Give a holding back."""
        self._forget(holding)
        self._give(holding)

    def quarantine(self, holding: Holding) -> None:
        """Take a holding out of service: a NaN may live in it."""
        self._forget(holding)
        self._quarantined.append(holding)

    def scrub(self) -> int:
        """Zero what is quarantined and put it back into service; returns the pages regained."""
        regained = self.quarantined_pages
        for holding in self._quarantined:
            self._zero(holding.slot, holding.pages)
            self._give(holding)
        self._quarantined.clear()
        return regained

    def _forget(self, holding: Holding) -> None:
        assert holding.slot in self._held, f"slot {holding.slot} is not held"
        self._held.remove(holding.slot)

    def _give(self, holding: Holding) -> None:
        self._free_slots.append(holding.slot)
        self._free_pages.extend(reversed(holding.pages))
