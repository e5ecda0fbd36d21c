"""Will it fit? Parameter and memory arithmetic of a spec against what the cluster offers.

The error's text is the arithmetic itself, so that a user sees which number to change. Figures are
fp32: committed versions (`max_live_versions`, and one being activated), and on a group the
trainer's master, two moments, gradients and the shadow of an update.
"""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.count import count_parameters
from k3ray.config.model import TextConfig
from k3ray.config.resolve import resolve_model
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import PlacementError
from k3ray.placement.memory_plan import CHUNK, cache_bytes_per_token, request_state

BYTES_FP32 = 4
PROCESS_BYTES = 350 * 1024 * 1024
"""Resident bytes of an actor before it holds a tensor (interpreter, torch, Ray), measured."""

TRAIN_COPIES = 7
"""Master, two moments, gradients, and the shadow's master and moments."""


def group_bytes(
    text: TextConfig, num_experts: int, max_live_versions: int, *, num_copied: int = 0
) -> int:
    """Bytes of one group that owns `num_experts` of every layer, trainer included, and has copies
    of `num_copied` more to serve from."""
    each = len(text.moe_layers) * count_parameters(text).per_expert
    served = (num_experts + num_copied) * (max_live_versions + 1)
    return PROCESS_BYTES + BYTES_FP32 * each * (served + num_experts * TRAIN_COPIES)


def stack_bytes(text: TextConfig, spec: SupernodeSpec) -> int:
    """Bytes of one attention stack: dense versions, latent pages, KDA state slots."""
    parameters = count_parameters(text).dense * (spec.max_live_versions + 1)
    pages = spec.engine.num_pages * CHUNK * cache_bytes_per_token(text, BYTES_FP32)
    slots = spec.engine.max_running * request_state(text, BYTES_FP32, spec.numeric_mode).total
    return PROCESS_BYTES + BYTES_FP32 * parameters + pages + slots


def check_fits(
    spec: SupernodeSpec, cluster: LocalClusterConfig, *, memory_bytes: int | None = None
) -> tuple[str, ...]:
    """`check_resources` of a local cluster; see there.

    Args:
        spec: What is asked for.
        cluster: What the local Ray node will offer.
        memory_bytes: Memory that may be used; None: what this machine has available now.
    """
    memory = psutil.virtual_memory().available if memory_bytes is None else memory_bytes
    resources = {**cluster.resources, "memory": memory}
    return check_resources(spec, resolve_model(spec).text_config, resources)


def check_resources(
    spec: SupernodeSpec, text: TextConfig, resources: Mapping[str, float]
) -> tuple[str, ...]:
    """Check units and memory; returns the lines of the arithmetic.

    Args:
        spec: What is asked for.
        text: Sizes of the model that the spec names.
        resources: What the cluster offers: `k3_group`, `k3_stack` in units and, where known,
            `memory` in bytes (all nodes together).

    Raises:
        PlacementError: something does not fit; the message carries the arithmetic.
    """
    sizes = _group_sizes(spec, text)
    groups = sum(
        group_bytes(
            text, size, spec.max_live_versions,
            num_copied=sum(sizes[index - step] for step in range(1, spec.replication)),
        )
        for index, size in enumerate(sizes)
    )  # fmt: skip
    stacks = spec.stacks * stack_bytes(text, spec)
    needs = {"k3_group": float(spec.groups), "k3_stack": float(spec.stacks)}
    if "memory" in resources:
        needs["memory"] = float(groups + stacks)
    lines = [
        f"{name}: {_amount(name, need)} needed, {_amount(name, resources.get(name, 0.0))} offered"
        for name, need in needs.items()
    ]
    count = count_parameters(text)
    lines.append(
        f"memory = {spec.groups} groups {_amount('memory', groups)} + {spec.stacks} stacks "
        f"{_amount('memory', stacks)} ({len(text.moe_layers)} MoE layers x {text.num_experts} "
        f"experts x {count.per_expert} + {count.dense} parameters, "
        f"{spec.max_live_versions} live versions, replication {spec.replication}, fp32)"
    )
    short = [name for name, need in needs.items() if need > resources.get(name, 0.0)]
    if short:
        raise PlacementError(
            f"the cluster cannot hold {spec.name!r} ({spec.preset}): " + "; ".join(lines),
            remedy=f"offer more {' and '.join(short)}, or lower groups, stacks or the preset",
            short=tuple(short),
            needs=needs,
        )
    return tuple(lines)


def _group_sizes(spec: SupernodeSpec, text: TextConfig) -> tuple[int, ...]:
    if spec.partition is not None:
        return tuple(len(part) for part in spec.partition)
    size, larger = divmod(text.num_experts, spec.groups)
    return tuple(size + (index < larger) for index in range(spec.groups))


def _amount(name: str, value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if name == "memory" else f"{value:g}"
