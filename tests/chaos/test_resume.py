"""Everything dies at once; `k3ray up --resume` brings back the same, by one command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from k3ray.actors.local_ray import free_port
from k3ray.actors.processes import find_marked
from k3ray.cli.kill_show import Stream, stream_completion
from k3ray.config.home import Home

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

Command = Callable[..., str]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(root=tmp_path / "home")


@pytest.fixture
def k3ray(home: Home) -> Iterator[Command]:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "k3ray.cli.main", *arguments],
            env={**os.environ, "K3RAY_HOME": str(home.root)}, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield run
    run("down")


def ask(port: int) -> Stream:
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=120)
    return stream_completion(client, "Resume: ", max_tokens=20, seed=5, on_token=lambda _: None)


def test_everything_dies_and_one_command_brings_it_back(k3ray: Command, home: Home) -> None:
    port = free_port()
    k3ray("serve", "--preset", "k3-tiny", f"endpoint.port={port}", "seed=3")
    k3ray("scale", "--groups", "3")
    golden = ask(port)
    for pid in find_marked(home.marker):
        os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    k3ray("up", "--resume")
    assert ask(port).steps == golden.steps
    print(f"first answer {time.monotonic() - began_s:.1f} s after the kill of everything")
    assert "group-2" in k3ray("status"), "the size that it was scaled to"

    raylet = find_marked(home.marker, program="raylet")
    os.kill(raylet[0], signal.SIGKILL)
    k3ray("up", "--resume")
    assert ask(port).steps == golden.steps
    k3ray("up", "--resume")  # all is well: nothing happens
    assert ask(port).steps == golden.steps
