"""The cost of one decode hop: latents of one token to a live group and its rows back.

Brings up `k3-nano` with one group and times, from a process of its own, (a) the transport's hop per
MoE layer as a decoding stack makes it and (b) the same payload as a Ray actor call through the
object store (put, call, get). Prints p50 / p99 in ms (goal: hop p50 <= 0.5 ms), and how much of
the hop is the group's own arithmetic.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from bench_rows import record
from live import Live, live_supernode

from k3ray.actors.names import actor_name
from k3ray.actors.plan_holder import PlanHolder
from k3ray.actors.ray_calls import call
from k3ray.actors.specs import NAMESPACE
from k3ray.config.numeric import NumericMode
from k3ray.config.presets import PRESETS
from k3ray.ids import Incarnation
from k3ray.model.disaggregated import DisaggregatedExecutor
from k3ray.model.group_links import GroupLinks
from k3ray.model.self_test import handshake_digest
from k3ray.transport.protocol import Lane
from k3ray.transport.zeromq_client import ZeroMqClient


@ray.remote(num_cpus=0)
class Echo:
    """The baseline's peer: returns rows of the right size, computes nothing."""

    def rows(self, latents: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return np.repeat(latents[:, None, :], ids.shape[1], axis=1)


def quantiles_ms(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """p50 and p99 of `call` in ms, after a tenth as warm-up."""
    for _ in range(repeats // 10):
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return float(np.percentile(times, 50)), float(np.percentile(times, 99))


def serve_lane(live: Live) -> dict[str, Any]:
    """The group's counters of the serve lane, read now."""
    group = live.actors("expert_group")[0]
    name = actor_name(Incarnation(actor=group["id"], term=group["term"]))
    actor = ray.get_actor(name, namespace=NAMESPACE)
    status: dict[str, Any] = call(actor, "status", peer=group["id"], limit_s=10.0)
    lane: dict[str, Any] = status["lanes"]["serve"]
    return lane


def busy_per_request_ms(live: Live, before: dict[str, Any]) -> float:
    """Mean time that the group computed for one request since `before`."""
    after = serve_lane(live)
    requests = after["requests"] - before["requests"]
    return 1e3 * float(after["busy_s"] - before["busy_s"]) / float(requests)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    text = PRESETS["k3-nano"].text_config
    with live_supernode("groups=1", preset="k3-nano") as live:
        version = live.supernode.call("latest_version", "main")
        plans = PlanHolder()
        plans.set(live.supernode.call("plan"))
        digest = handshake_digest(text, NumericMode.DETERMINISTIC)
        links = GroupLinks(ZeroMqClient(Incarnation(actor="bench", term=1), digest=digest))
        executor = DisaggregatedExecutor(links, plans, version=version, lane=Lane.SERVE)
        latents = torch.randn(1, text.routed_expert_hidden_size)
        ids = torch.arange(text.num_experts_per_token)[None]
        layer = text.moe_layers[0]
        before = serve_lane(live)
        hop = quantiles_ms(lambda: executor.forward(layer, latents, ids), repeats)
        busy_ms = busy_per_request_ms(live, before)
        echo = Echo.remote()
        flat, chosen = latents.numpy(), ids.numpy()
        store = quantiles_ms(
            lambda: ray.get(echo.rows.remote(ray.put(flat), ray.put(chosen))), repeats // 4
        )
    record("hop", {
        "hop_p50_ms": round(hop[0], 3), "hop_p99_ms": round(hop[1], 3),
        "expert_forward_mean_ms": round(busy_ms, 3),
        "object_store_p50_ms": round(store[0], 3), "object_store_p99_ms": round(store[1], 3),
        "ratio_p50": round(store[0] / hop[0], 1),
    })  # fmt: skip
    return 0 if hop[0] <= 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
