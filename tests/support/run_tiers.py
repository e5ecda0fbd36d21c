"""Runs the tiers of tests one after the other and closes with one pytest-like line.

Tiers, budgets and worker counts are in pyproject.toml (`[tool.k3ray.test-budgets]`). Each tier is
its own pytest process: the fast ones with xdist, the ones that start Ray alone on the machine.
A tier that fails, that is empty or that exceeds its budget fails the whole run; the others still
run, so that one look shows everything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
GRACE = 1.5
"""A tier is ended when it has run this many times its budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A folder under tests/ with its time budget and number of xdist workers (0: none).

    Args:
        env: Set for its process: what must stand before the first import.
    """

    name: str
    budget_s: float
    workers: int
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, report: Path) -> list[str]:
        """The pytest command line."""
        command = [sys.executable, "-m", "pytest", f"tests/{self.name}", "-q", "--no-header",
                   "--durations=5", "--durations-min=5", f"--junitxml={report}"]  # fmt: skip
        return [*command, "-n", str(self.workers)] if self.workers else command


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a tier did. `status` is pytest's exit status, or 124 when it was ended."""

    tier: Tier
    passed: int
    failed: int
    skipped: int
    seconds: float
    status: int

    @property
    def ok(self) -> bool:
        """Whether everything passed, in time, and there was something to pass."""
        return self.status == 0 and self.passed > 0

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"FAILED (status {self.status})"
        return (
            f"{self.tier.name:9} {self.passed:5} passed {self.failed:3} failed "
            f"{self.skipped:3} skipped {self.seconds:7.1f} s of {self.tier.budget_s:g} s  {verdict}"
        )


def read_tiers(pyproject: Path) -> tuple[Tier, ...]:
    """The tiers in the order of the file."""
    with pyproject.open("rb") as file:
        table = tomllib.load(file)["tool"]["k3ray"]["test-budgets"]
    return tuple(
        Tier(
            name=name,
            budget_s=float(entry["seconds"]),
            workers=int(entry["workers"]),
            env=entry.get("env", {}),
        )
        for name, entry in table.items()
    )


def run_tier(tier: Tier) -> Outcome:
    """Run one tier; its output goes straight to ours."""
    environment = {**os.environ, "K3RAY_TEST_TIER": tier.name, "OMP_NUM_THREADS": "1", **tier.env}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="k3ray-tests-") as folder:
        report = Path(folder) / "report.xml"
        process = subprocess.Popen(
            tier.command(report), cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(timeout=tier.budget_s * GRACE)
        except subprocess.TimeoutExpired:
            print(f"\ntier {tier.name} ended after {GRACE:g} x its budget", flush=True)
            status = 124
        finally:
            _end_group(process)
        seconds = time.monotonic() - started
        passed, failed, skipped = count_tests(report)
    return Outcome(
        tier=tier, passed=passed, failed=failed, skipped=skipped, seconds=seconds, status=status
    )


def count_tests(report: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a JUnit file; zeros when pytest wrote none."""
    if not report.exists():
        return 0, 0, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    passed = failed = skipped = 0
    for suite in suites:
        wrong = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        left_out = int(suite.get("skipped", 0))
        passed += int(suite.get("tests", 0)) - wrong - left_out
        failed += wrong
        skipped += left_out
    return passed, failed, skipped


def closing_line(outcomes: Sequence[Outcome]) -> str:
    """One line like pytest's own last one, over all tiers."""
    sums = [
        (sum(outcome.failed for outcome in outcomes), "failed"),
        (sum(outcome.passed for outcome in outcomes), "passed"),
        (sum(outcome.skipped for outcome in outcomes), "skipped"),
    ]
    broken = sum(not outcome.ok and outcome.failed == 0 for outcome in outcomes)
    parts = [f"{number} {word}" for number, word in sums if number or word == "passed"]
    parts += [f"{broken} tiers broken"] if broken else []
    seconds = sum(outcome.seconds for outcome in outcomes)
    minutes = f"{int(seconds // 60)}:{int(seconds % 60):02}"
    return f" {', '.join(parts)} in {seconds:.2f}s ({minutes}) ".center(80, "=")


def main(names: Sequence[str]) -> int:
    """Run the named tiers (all when none is named); returns the exit status."""
    tiers = read_tiers(ROOT / "pyproject.toml")
    unknown = sorted(set(names) - {tier.name for tier in tiers})
    if unknown:
        print(f"error: unknown tiers {', '.join(unknown)}", file=sys.stderr)
        return 2
    outcomes = []
    for tier in tiers:
        if names and tier.name not in names:
            continue
        print(f"\n== {tier.name} (budget {tier.budget_s:g} s)", flush=True)
        outcomes.append(run_tier(tier))
    print("\ntier      tests", *outcomes, sep="\n")
    print(closing_line(outcomes), flush=True)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End pytest and xdist's workers; Ray's daemons have sessions and owners of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
