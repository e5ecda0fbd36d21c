"""The line by `ray job submit`: curate, pretrain on the live groups, serve what was trained.

`k3-tiny` with a byte tokenizer on the sources of this project; small, but every part is real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Live, live_supernode, wait_for

from k3ray.actors.local_ray import ray_command

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TRAIN = ["supernode.preset=k3-tiny", "micro_batches=1", "sequences_per_micro_batch=2",
         "eval_sequences=4", "checkpoint_every=10"]  # fmt: skip


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_supernode() as running:
        yield running


@pytest.fixture(scope="module")
def data_dir(live: Live) -> Path:
    out = live.home.root / "data"
    job(live, "curate", [f"sources=[{ROOT / 'k3ray'}]", f"out_dir={out}", "vocab_size=512",
                         "sequence_length=128", "heldout_fraction=0.2"])  # fmt: skip
    return out


def submit(live: Live, pipeline: str, words: list[str]) -> subprocess.Popen[str]:
    command = [*ray_command(), "job", "submit", "--address", live.supernode.info.dashboard_url,
               "--working-dir", str(ROOT), "--", "python", "-m", f"pipelines.{pipeline}",
               *words]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def job(live: Live, pipeline: str, words: list[str], *, code: int = 0) -> str:
    process = submit(live, pipeline, words)
    output, _ = process.communicate(timeout=400)
    assert (process.returncode == 0) == (code == 0), output
    return output


def complete(live: Live) -> dict[str, Any]:
    body = {"model": "kimi-k3", "prompt": "import", "max_tokens": 8, "seed": 1, "temperature": 0.3}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def kill_driver_after(live: Live, word: str, words: list[str]) -> str:
    """Pretrain; SIGKILL the driver, if it still lives, as soon as it has printed `word`."""
    output = ""
    with submit(live, "pretrain", words) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if word in line and (pid := driver_pid(live)) is not None:
                os.kill(pid, signal.SIGKILL)
    return output


def pids(live: Live, role: str) -> list[int]:
    return [actor["pid"] for actor in live.actors(role)]


def driver_pid(live: Live) -> int | None:
    """The job's driver; `ray job submit` itself has the same words, but later ones."""
    for pid in live.pids():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[1:3] == [b"-m", b"pipelines.pretrain"]:
            return pid
    return None


def training_step(live: Live) -> int:
    return int((live.status()["training"].get("main") or {}).get("step") or 0)


def test_the_data_set_is_whole(data_dir: Path) -> None:
    report = json.loads((data_dir / "report.json").read_text(encoding="utf-8"))
    assert (data_dir / "manifest.json").is_file()
    assert report


def test_driver_killed_line_refused_then_trained(live: Live, data_dir: Path) -> None:
    before = complete(live)["system_fingerprint"]
    actors = pids(live, "expert_group") + pids(live, "attention_stack")
    words = [f"data_dir={data_dir}", *TRAIN]
    first = submit(live, "pretrain", [*words, "steps=100000"])
    wait_for(lambda: training_step(live) >= 2, live.status)

    refused = job(live, "pretrain", [*words, "steps=5"], code=2)
    assert "line_busy" in refused

    pid = driver_pid(live)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=120)
    assert complete(live)["system_fingerprint"] == before
    assert pids(live, "expert_group") + pids(live, "attention_stack") == actors

    wait_for(lambda: not live.status()["leases"], live.status, limit_s=90.0)
    done = training_step(live)
    output = kill_driver_after(live, "published main@", [*words, f"steps={done + 5}"])
    assert "published main@" in output
    assert complete(live)["system_fingerprint"] != before
    assert pids(live, "expert_group") + pids(live, "attention_stack") == actors
