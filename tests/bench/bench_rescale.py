"""Changing the size under load: what streams saw, what was moved, what a fault in between does.

`k3-tiny`, four seeded streams compared by log-prob bits. Groups 2 -> 3 -> 5 -> 2, then stacks
1 -> 2 -> 1; the worst gap between two tokens from the order until all is done, over the p99 of gaps
without a change; expert bytes moved against a minimum computed here. Then `--faults` changes with a
SIGKILL at a seeded moment of each: taken back or completed, and still nothing lost.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

from bench_failover import Load
from bench_rows import record
from live import Live, live_supernode, wait_for

from k3ray.client.loadgen import percentile
from k3ray.config.count import count_parameters
from k3ray.config.presets import PRESETS
from k3ray.errors import K3RayError

TEXT = PRESETS["k3-tiny"].text_config
CHANGES = ({"groups": 3}, {"groups": 5}, {"groups": 2}, {"stacks": 2}, {"stacks": 1})
ROLES = ("expert_group", "attention_stack", "controller")


def gaps(load: Load, since_s: float) -> list[float]:
    """Seconds between two tokens of one stream, from `since_s` on."""
    found = []
    for arrivals in load.arrivals:
        times = [t for t in list(arrivals) if t >= since_s]
        found += [b - a for a, b in itertools.pairwise(times)]
    return found


def fewest_moves(sizes: list[int], groups: int) -> int:
    """Experts that must change their home for an even share, whoever gets which share."""
    size, larger = divmod(TEXT.num_experts, groups)
    wanted = sorted((size + (index < larger) for index in range(groups)), reverse=True)
    held = sorted(sizes, reverse=True)
    return TEXT.num_experts - sum(min(a, b) for a, b in zip(held, wanted, strict=False))


def settled(live: Live) -> dict[str, Any] | None:
    """The status once no change is under way and all is ready."""
    try:
        document = live.status()
    except K3RayError:
        return None
    done = not document["scaling"]["under_way"] and document["state"] == "ready"
    return document if done else None


def home_sizes(document: dict[str, Any]) -> list[int]:
    """Experts per group, of one layer."""
    owned = [a["home_experts"] for a in document["actors"] if a["role"] == "expert_group"]
    return [len(next(iter(homes.values()))) for homes in owned]


def change(live: Live, load: Load, wanted: dict[str, int], calm_p99_s: float) -> dict[str, Any]:
    """One change under load."""
    before = live.status()
    began_s = time.monotonic()
    asked = live.supernode.call("scale", wanted.get("groups"), wanted.get("stacks"))
    wait_for(lambda: settled(live) is not None)
    took_s = time.monotonic() - began_s
    time.sleep(1.0)
    worst_s = max(gaps(load, began_s - 0.5), default=0.0)
    per_expert = 4 * count_parameters(TEXT).per_expert * len(TEXT.moe_layers)
    least = fewest_moves(home_sizes(before), wanted["groups"]) if "groups" in wanted else 0
    return {
        "to": wanted, "took_s": round(took_s, 2), "worst_gap_s": round(worst_s, 3),
        "worst_over_p99": round(worst_s / calm_p99_s, 1),
        "moved_bytes": asked["loads"] * per_expert, "least_bytes": least * per_expert,
        "failure": live.status()["scaling"]["failure"],
    }  # fmt: skip


def faulty_change(live: Live, chance: random.Random, turn: int) -> str:
    """A change with a kill at some moment of it: "completed ..." or "taken back ..."."""
    groups = 3 if live.status()["scaling"]["groups"] == 2 else 2
    live.supernode.call("scale", groups, None)
    time.sleep(chance.uniform(0.0, 6.0))
    role = ROLES[turn % len(ROLES)]
    victims = [a for a in live.actors(role) if a["pid"]]
    victim = victims[int(chance.random() * len(victims))]
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for(lambda: settled(live) is not None)
    scaling = live.status()["scaling"]
    outcome = "completed" if scaling["groups"] == groups else "taken back"
    print(f"fault {turn + 1}: killed {victim['id']} while going to {groups} groups: {outcome} "
          f"({scaling['failure'] or scaling['reason']})", flush=True)  # fmt: skip
    return f"{outcome}, {role} killed"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with live_supernode("stacks=1", "replication=1") as live:
        load = Load(live.url)
        load.start()
        time.sleep(3.0)
        calm_s = time.monotonic()
        time.sleep(8.0)
        calm_p99_s = percentile(gaps(load, calm_s), 0.99)
        rows = [change(live, load, wanted, calm_p99_s) for wanted in CHANGES]
        for row in rows:
            print(row, flush=True)
        chance = random.Random(options.seed)
        outcomes = Counter(faulty_change(live, chance, turn) for turn in range(options.faults))
        load.stop()
        damage = load.damage
        record("rescale", {
            "calm_gap_p99_s": round(calm_p99_s, 4), "changes": rows, "faults": options.faults,
            "outcomes": dict(sorted(outcomes.items())), "streams": load.num_streams,
            "lost": damage.lost, "doubled": damage.doubled, "changed": damage.changed,
            "errors": len(load.errors),
        })  # fmt: skip
        print(*load.errors[:3], sep="\n", flush=True)
        least = all(row["moved_bytes"] == row["least_bytes"] for row in rows)
        return 0 if damage.none and not load.errors and least else 1


if __name__ == "__main__":
    sys.exit(main())
