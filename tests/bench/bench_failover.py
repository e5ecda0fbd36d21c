"""Kills under load: what the clients saw, and how long they waited.

Brings up `k3-tiny` (2 groups, without replica unless asked for, 2 stacks), runs four seeded streams
without pause, and SIGKILLs a group, then a stack, `--kills` times each. Every stream's tokens and
log-prob bits are compared with an undisturbed run. Prints lost / doubled / changed tokens and the
stall's p50 / p99 per kind of kill.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time

from bench_rows import record
from live import Live, live_supernode
from openai import OpenAI

from k3ray.cli.kill_show import Stream, stream_completion, wait_rebuilt
from k3ray.client.loadgen import Damage, compare_tokens

NUM_STREAMS, NUM_TOKENS = 4, 96


class Load:
    """Four client threads that stream for ever and keep what they saw."""

    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="x", timeout=300, max_retries=0)
        self.golden = [self._stream(i) for i in range(NUM_STREAMS)]
        self.damage = Damage()
        self.num_streams = 0
        self.errors: list[str] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(NUM_STREAMS)
        ]

    def _stream(self, i: int, note: list[float] | None = None) -> Stream:
        def on_token(_count: int) -> None:
            if note is not None:
                note.append(time.monotonic())

        return stream_completion(
            self._client, f"Stream number {i}: ", max_tokens=NUM_TOKENS, seed=i, on_token=on_token
        )

    def _run(self, i: int) -> None:
        while not self._over.is_set():
            try:
                seen = self._stream(i, self.arrivals[i])
            except Exception as error:  # every kind counts as damage
                with self._lock:
                    self.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)
                continue
            with self._lock:
                self.num_streams += 1
                self.damage += compare_tokens(self.golden[i].steps, seen.steps)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=120)


def stalls_after(load: Load, killed_s: float) -> list[float]:
    """Per stream: the gap between its last token before the kill and its next one, in s."""
    gaps = []
    for arrivals in load.arrivals:
        before = [t for t in arrivals if t <= killed_s]
        after = [t for t in arrivals if t > killed_s]
        worst = 0.0
        previous = before[-1] if before else killed_s
        for moment in after:
            worst = max(worst, moment - previous)
            previous = moment
        gaps.append(worst)
    return gaps


def kill_round(live: Live, load: Load, role: str, turn: int) -> tuple[list[float], float]:
    """One kill: (stalls of the streams, seconds until the actor was ready again)."""
    actors = sorted(live.actors(role), key=lambda a: str(a["id"]))
    victim = actors[turn % len(actors)]
    for arrivals in load.arrivals:
        arrivals.clear()
    time.sleep(0.5)
    killed_s = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    wait_rebuilt(live.status, victim["id"], than_term=victim["term"])
    rebuilt_s = time.monotonic() - killed_s
    time.sleep(1.0)
    return stalls_after(load, killed_s), rebuilt_s


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--replication", type=int, default=1)
    parser.add_argument("--roles", default="expert_group,attention_stack")
    options = parser.parse_args()
    ok = True
    with live_supernode("stacks=2", f"replication={options.replication}") as live:
        for role in options.roles.split(","):
            load = Load(live.url)
            load.start()
            time.sleep(2.0)
            stalls: list[float] = []
            rebuilds: list[float] = []
            for turn in range(options.kills):
                seen, rebuilt_s = kill_round(live, load, role, turn)
                stalls += seen
                rebuilds.append(rebuilt_s)
                print(f"{role} kill {turn + 1}: rebuilt {rebuilt_s:.2f} s, worst stall "
                      f"{max(seen):.2f} s", flush=True)  # fmt: skip
            load.stop()
            damage = load.damage
            row = {
                "role": role, "replication": options.replication, "kills": options.kills,
                "streams": load.num_streams,
                "lost": damage.lost, "doubled": damage.doubled, "changed": damage.changed,
                "errors": len(load.errors),
                "stall_p50_s": round(statistics.median(stalls), 3),
                "stall_p99_s": round(sorted(stalls)[int(0.99 * (len(stalls) - 1))], 3),
                "rebuild_p50_s": round(statistics.median(rebuilds), 3),
            }  # fmt: skip
            record("failover", row)
            print(*load.errors[:3], sep="\n", flush=True)
            ok &= damage.none and not load.errors
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
