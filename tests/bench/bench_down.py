"""`k3ray down` in ten states: what is left of processes, sockets and shared memory (want: 0).

Each state gets a fresh home, is produced by real commands and signals, and is then ended by a real
`k3ray down`. Prints a row per state.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from bench_rows import record

from k3ray.actors.local_ray import free_port
from k3ray.actors.processes import find_marked
from k3ray.config.home import Home

K3RAY = [sys.executable, "-m", "k3ray.cli.main"]


class State:
    """One home with the means to disturb it."""

    def __init__(self) -> None:
        self.home = Home(root=Path(tempfile.mkdtemp(prefix="k3ray-down-")))
        self.env = {**os.environ, "K3RAY_HOME": str(self.home.root)}
        self.port = free_port()

    def k3ray(self, *words: str, limit_s: float = 180.0) -> str:
        done = subprocess.run(
            [*K3RAY, *words],
            env=self.env,
            check=False,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        if done.returncode:
            raise RuntimeError(f"k3ray {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def up(self) -> None:
        self.k3ray("up", "--preset", "k3-tiny")

    def serve(self) -> None:
        self.k3ray("serve", "--preset", "k3-tiny", "--port", str(self.port))

    def pid_of(self, role: str) -> int:
        actors = json.loads(self.k3ray("status", "--json"))["actors"]
        return int(next(a["pid"] for a in actors if a["role"] == role))

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid_of(role), number)

    def kill_command(self, word: str, number: signal.Signals = signal.SIGKILL) -> None:
        for pid in find_marked(self.home.marker):
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, number)

    def stream(self) -> None:
        def read() -> None:
            body = {"model": "kimi-k3", "prompt": "x", "max_tokens": 2000, "stream": True}
            try:
                with httpx.stream(
                    "POST", f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=60
                ) as answer:
                    for _ in answer.iter_lines():
                        pass
            except httpx.HTTPError:
                return

        threading.Thread(target=read, daemon=True).start()
        time.sleep(1.0)

    def interrupted_up(self) -> None:
        process = subprocess.Popen([*K3RAY, "up", "--preset", "k3-tiny"], env=self.env)
        time.sleep(8.0)
        process.kill()
        process.wait()


def _served(then: Callable[[State], None]) -> Callable[[State], None]:
    def produce(state: State) -> None:
        state.serve()
        then(state)

    return produce


STATES: dict[str, Callable[[State], None]] = {
    "never up": lambda s: None,
    "up, idle": lambda s: s.up(),
    "up, serving": lambda s: s.serve(),
    "a stream in flight": _served(lambda s: s.stream()),
    "a group just killed": _served(lambda s: s.kill("expert_group")),
    "a stack stopped": _served(lambda s: s.kill("attention_stack", signal.SIGSTOP)),
    "the controller killed": _served(lambda s: s.kill("controller")),
    "the raylet killed": _served(lambda s: s.kill_command("raylet/raylet")),
    "the GCS killed": _served(lambda s: s.kill_command("gcs_server")),
    "up killed half-way": lambda s: s.interrupted_up(),
}


def check(name: str, produce: Callable[[State], None]) -> dict[str, object]:
    """Produce one state, take it down, count what is left."""
    state = State()
    shm = set(os.listdir("/dev/shm"))
    produce(state)
    started_s = time.monotonic()
    state.k3ray("down")
    took_s = time.monotonic() - started_s
    with socket.socket() as probe:
        listening = probe.connect_ex(("127.0.0.1", state.port)) == 0
    shutil.rmtree(state.home.root, ignore_errors=True)
    return {
        "state": name,
        "down_s": round(took_s, 1),
        "processes": len(find_marked(state.home.marker)),
        "files": int(state.home.temp_dir.exists()),
        "shared_memory": len(set(os.listdir("/dev/shm")) - shm),
        "port": int(listening),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="run just the states whose name contains this")
    only = parser.parse_args().only
    total = 0
    for name, produce in STATES.items():
        if only and only not in name:
            continue
        row = check(name, produce)
        total += sum(int(str(row[k])) for k in ("processes", "files", "shared_memory", "port"))
        record("down", row)
    print(f"leftovers: {total}")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
