"""A seeded chaos campaign on a fresh `k3-tiny` supernode: what the clients saw.

Two groups with replicas (unless asked for otherwise), two stacks, four streams; groups, stacks, the
controller and ingresses are killed, stopped and slowed down. Same seed, same faults at the same
logical points. Exit status 1 if a client saw anything.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from bench_rows import record
from live import live_supernode

from k3ray.client.campaign import Campaign, seeded_asks
from k3ray.client.faults import schedule
from k3ray.client.kimi import AsyncKimiClient


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--replication", type=int, default=2)
    options = parser.parse_args()

    with live_supernode("stacks=2", f"replication={options.replication}") as live:

        async def campaign() -> tuple[bool, dict[str, Any]]:
            async with AsyncKimiClient(live.url, max_breaks=60) as client:
                running = Campaign(client=client, status=live.status, asks=seeded_asks(4, 96))
                planned = schedule(options.seed, options.faults, tokens_between=200)
                return await running.run(planned), running.report()

        unseen, report = asyncio.run(campaign())
        row = {"seed": options.seed, "replication": options.replication, **report}
        record("chaos", row)
    return 0 if unseen else 1


if __name__ == "__main__":
    sys.exit(main())
