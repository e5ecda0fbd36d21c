from __future__ import annotations

import pytest

from tests.support.parity_ops import DECAYS, KDA_LENGTHS, Row, attnres_rows, gate_rows, kda_rows


def check(rows: list[Row]) -> None:
    for row in rows:
        print(f"{row.case}: {row.what}: {row.error:.1e} (bound {row.bound:.0e})")
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("length", KDA_LENGTHS)
def test_chunkwise_kda_equals_recurrence_and_fla(length: int, kind: str) -> None:
    check(kda_rows((length,), kind))


@pytest.mark.parametrize("kind", DECAYS)
def test_chunkwise_kda_of_packed_documents(kind: str) -> None:
    check(kda_rows((1, 64, 65, 2, 130, 63), kind))


def test_gate_equals_fla() -> None:
    check(gate_rows())


@pytest.mark.parametrize("num_sources", [1, 2, 5, 9])
def test_attnres_equals_fla(num_sources: int) -> None:
    check(attnres_rows(num_sources))
