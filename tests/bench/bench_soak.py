"""2,000 requests: do memory, handles or shared memory grow?

Brings up `k3-tiny`, sends `--requests` short completions (8 at a time), and reads RSS, open files
and threads of every process of the supernode at a quarter of the way and at the end. Prints a row
per process and the largest ratio (goal: RSS <= 1.02).
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from bench_rows import record
from live import Live, live_supernode


def send(url: str, first: int, count: int) -> int:
    """Send `count` completions, 8 at a time; returns how many were answered 200."""
    with httpx.Client(timeout=120.0) as client:

        def one(i: int) -> int:
            body = {"model": "kimi-k3", "prompt": f"Request {i}", "max_tokens": 4, "seed": i}
            return int(client.post(f"{url}/v1/completions", json=body).status_code == 200)

        with ThreadPoolExecutor(8) as pool:
            return sum(pool.map(one, range(first, first + count)))


def measure(live: Live) -> dict[int, dict[str, float]]:
    """RSS in bytes, open files and threads by pid, for the supernode's own roles."""
    found = {}
    for actor in live.status()["actors"]:
        process = psutil.Process(actor["pid"])
        found[actor["pid"]] = {
            "name": f"{actor['role']} {actor['id']}",
            "rss": process.memory_info().rss,
            "files": process.num_fds(),
            "threads": process.num_threads(),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2000)
    total = parser.parse_args().requests
    quarter = total // 4
    with live_supernode() as live:
        answered = send(live.url, 0, quarter)
        shm_before, before = set(os.listdir("/dev/shm")), measure(live)
        answered += send(live.url, quarter, total - quarter)
        shm_after, after = set(os.listdir("/dev/shm")), measure(live)
    rows = []
    for pid, new in after.items():
        old = before[pid]
        rows.append({
            "process": new["name"], "rss_mib": round(new["rss"] / 2**20, 1),
            "rss_ratio": round(new["rss"] / old["rss"], 4),
            "files": [old["files"], new["files"]], "threads": [old["threads"], new["threads"]],
        })  # fmt: skip
    grown = len(shm_after - shm_before)
    worst = max(row["rss_ratio"] for row in rows)
    record("soak", {
        "requests": total, "answered": answered, "worst_rss_ratio": worst,
        "new_shm_files": grown, "processes": rows,
    })  # fmt: skip
    return 0 if answered == total and worst <= 1.02 and grown == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
