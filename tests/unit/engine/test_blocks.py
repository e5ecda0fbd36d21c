from __future__ import annotations

import pytest

from k3ray.engine.blocks import StatePool, pages_for

Zeroed = list[tuple[int, tuple[int, ...]]]


def make_pool(slots: int = 2, pages: int = 4) -> tuple[StatePool, Zeroed]:
    zeroed: Zeroed = []
    pool = StatePool(
        num_slots=slots, num_pages=pages, zero=lambda slot, held: zeroed.append((slot, held))
    )
    return pool, zeroed


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (640, 10)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_allocation_is_zeroed_distinct_and_comes_back() -> None:
    pool, zeroed = make_pool()
    first, second = pool.allocate(3), pool.allocate(1)
    assert zeroed == [(first.slot, first.pages), (second.slot, second.pages)]
    assert first.slot != second.slot
    assert not set(first.pages) & set(second.pages)
    assert not pool.fits(0)
    pool.release(first)
    assert pool.fits(3)
    assert not pool.fits(4)
    pool.release(second)
    assert (pool.free_slots, pool.free_pages) == (2, 4)


def test_quarantine_stays_out_of_service_until_scrubbed() -> None:
    pool, zeroed = make_pool(slots=1, pages=2)
    holding = pool.allocate(2)
    pool.quarantine(holding)
    assert (pool.free_slots, pool.free_pages, pool.quarantined_pages) == (0, 0, 2)
    zeroed.clear()
    assert pool.scrub() == 2
    assert zeroed == [(holding.slot, holding.pages)]
    assert (pool.free_slots, pool.free_pages, pool.quarantined_pages) == (1, 2, 0)


def test_double_release_is_refused() -> None:
    pool, _ = make_pool()
    holding = pool.allocate(1)
    pool.release(holding)
    with pytest.raises(AssertionError, match="not held"):
        pool.release(holding)
