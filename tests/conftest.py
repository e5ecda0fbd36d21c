"""What holds in every tier: one thread, fixed seeds, Hypothesis profiles, the tier's budget."""

from __future__ import annotations

import os
import random
import sys
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_STARTED = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED] = time.monotonic()
    # Before anything imports torch: results do not depend on the number of cores.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile(
        "ci", max_examples=50, deadline=None, derandomize=True, database=None,
        suppress_health_check=slow,
    )  # fmt: skip
    settings.register_profile(
        "search", max_examples=1000, deadline=None, suppress_health_check=slow
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers whatever ran before; libraries that are not imported stay so."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a tier that took longer than `[tool.k3ray.test-budgets]` allows."""
    tier = os.environ.get("K3RAY_TEST_TIER")
    if tier is None or hasattr(session.config, "workerinput"):
        return
    with (Path(session.config.rootpath) / "pyproject.toml").open("rb") as file:
        budget_s = tomllib.load(file)["tool"]["k3ray"]["test-budgets"][tier]["seconds"]
    took_s = time.monotonic() - session.config.stash[_STARTED]
    if took_s > budget_s and exitstatus == pytest.ExitCode.OK:
        print(f"\ntier {tier} took {took_s:.1f} s, its budget is {budget_s} s", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
