"""The tier runner: budgets, counts, verdicts and the closing line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_tiers import Outcome, Tier, closing_line, count_tests, main, read_tiers

ROOT = Path(__file__).parents[2]


def _outcome(name: str, *, passed: int, failed: int = 0, status: int = 0) -> Outcome:
    return Outcome(
        tier=Tier(name=name, budget_s=10, workers=0), passed=passed, failed=failed, skipped=1,
        seconds=30.25, status=status,
    )  # fmt: skip


def test_tiers_come_from_pyproject_in_order() -> None:
    tiers = read_tiers(ROOT / "pyproject.toml")
    assert [tier.name for tier in tiers][:3] == ["unit", "property", "parity"]
    by_name = {tier.name: tier for tier in tiers}
    assert by_name["kernels"].env == {"TRITON_INTERPRET": "1"}
    assert by_name["unit"].env == {}
    assert "-n" in tiers[0].command(Path("r.xml"))
    assert "-n" not in next(t for t in tiers if t.name == "cluster").command(Path("r.xml"))


def test_counts_of_a_junit_file(tmp_path: Path) -> None:
    report = tmp_path / "r.xml"
    report.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'
    )
    assert count_tests(report) == (3, 3, 3)
    assert count_tests(tmp_path / "absent.xml") == (0, 0, 0)


def test_an_empty_or_ended_tier_is_not_ok() -> None:
    assert _outcome("unit", passed=1).ok
    assert not _outcome("unit", passed=0).ok
    assert not _outcome("unit", passed=5, status=124).ok
    assert "FAILED (status 124)" in str(_outcome("unit", passed=5, status=124))


def test_closing_line_sums_the_tiers() -> None:
    outcomes = [
        _outcome("unit", passed=5), _outcome("e2e", passed=2, failed=1, status=1),
        _outcome("chaos", passed=0, status=5),
    ]  # fmt: skip
    line = closing_line(outcomes)
    assert "1 failed, 7 passed, 3 skipped, 1 tiers broken in 90.75s (1:30)" in line
    assert line.startswith("===")


def test_unknown_tier_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unti"]) == 2
    assert "unknown tiers unti" in capsys.readouterr().err
