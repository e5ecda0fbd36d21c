"""Rows of benchmarks: printed, and appended to tests/bench/results/<theme>.jsonl.

Every row says where it comes from: commit, versions, cores, load, date.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def record(theme: str, row: Mapping[str, Any]) -> None:
    """Print the row and append it with its circumstances."""
    whole = {
        **row,
        "commit": _commit(),
        "torch": version("torch"),
        "ray": version("ray"),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps(whole)
    print(text, flush=True)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{theme}.jsonl").open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"
