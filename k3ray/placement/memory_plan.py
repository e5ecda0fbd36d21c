"""What a model needs on N accelerators: weights, cache, request state, training; plain arithmetic.

Serving: the routed experts are spread over all ranks in their stored format; every attention stack
holds all dense weights and is itself spread over `stack_ranks` ranks. What is left of a rank's
memory is cache. Training adds, per parameter, float32 master, two moments, gradient, and the shadow
of an update (master and moments again); with host offload only the gradient stays on the
accelerator. Figures in bytes. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from k3ray.config.count import count_parameters
from k3ray.config.model import LayerKind, ModelConfig, TextConfig
from k3ray.config.numeric import ExpertFormat, NumericMode
from k3ray.errors import ConfigError
from k3ray.weights.release_layout import (
    check_format,
    count_vision,
    expert_bytes,
    total_bytes,
)

CHUNK = 64
"""Tokens of a KDA chunk and of a cache page."""

RESERVE = 0.08
"""Share of a rank's memory that is kept for activations, buffers and the allocator."""

TRAIN_BYTES: Mapping[str, int] = {"master": 4, "moments": 8, "gradient": 4, "shadow": 12}
"""Bytes per parameter, float32."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What there is.

    Args:
        accelerators: Ranks of the supernode.
        hbm_bytes: Memory of one rank.
        host_bytes: Host memory per rank, for offloaded training state.
        cache_bytes: Bytes of one cached value: 2 (BF16) or 4.
        experts: Format in which routed experts are served.
        stack_ranks: Ranks of one attention stack; None picks the fewest that fit.
        numeric: Deterministic mode keeps an open chunk per request.
    """

    accelerators: int
    hbm_bytes: int
    host_bytes: int = 0
    cache_bytes: int = 2
    experts: ExpertFormat = ExpertFormat.MXFP4
    stack_ranks: int | None = None
    numeric: NumericMode = NumericMode.DETERMINISTIC


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """Bytes of one request's KDA state over all layers, whatever its length."""

    recurrent: int
    convolution: int
    open_chunk: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.recurrent + self.convolution + self.open_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """One rank's memory while serving. `stack_ranks` is what was chosen or asked for."""

    stack_ranks: int
    stacks: int
    expert_bytes: int
    dense_bytes: int
    reserve_bytes: int
    free_bytes: int
    request_bytes: int
    fits: bool

    @property
    def requests_per_stack(self) -> int:
        """Requests of the model's full context that one stack can hold."""
        return max(0, self.free_bytes) * self.stack_ranks // self.request_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """All parameters' training state. `hbm_bytes` and `host_bytes` are per rank with offload."""

    state_bytes: int
    hbm_bytes_offloaded: int
    host_bytes_offloaded: int
    min_accelerators: int
    min_accelerators_offloaded: int | None
    fits: bool
    fits_offloaded: bool


def cache_bytes_per_token(cfg: TextConfig, cache_bytes: int) -> int:
    """Bytes that one more token of one request takes: the latents of all MLA layers."""
    layers = cfg.layer_kinds.count(LayerKind.MLA)
    return layers * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * cache_bytes


def request_state(
    cfg: TextConfig, cache_bytes: int, numeric: NumericMode = NumericMode.DETERMINISTIC
) -> RequestState:
    """KDA state of one request.

    Recurrent state and open chunk are float32; convolution inputs have the cache's dtype.
    """
    linear, layers = cfg.linear_attn_config, cfg.layer_kinds.count(LayerKind.KDA)
    width = linear.num_heads * linear.head_dim
    row = 3 * width + linear.num_heads  # k, v, g and beta
    rows = CHUNK - 1 if numeric is NumericMode.DETERMINISTIC else 0
    return RequestState(
        recurrent=layers * width * linear.head_dim * 4,
        convolution=layers * (linear.short_conv_kernel_size - 1) * 3 * width * cache_bytes,
        open_chunk=layers * rows * row * 4,
    )


def checkpoint_bytes(model: ModelConfig) -> dict[str, int]:
    """Bytes of a checkpoint's tensors by expert format, vision included where there is any; MXFP4
    is absent when the experts' sizes do not allow it."""
    sizes: dict[str, int] = {}
    for experts in ExpertFormat:
        try:
            check_format(model.text_config, experts)
        except ConfigError:
            continue
        sizes[str(experts)] = total_bytes(model, experts)
    return sizes


def plan_serving(model: ModelConfig, offer: Offer) -> ServingPlan:
    """Spread experts over all ranks and dense weights over `stack_ranks`.

    Raises:
        ConfigError: the format does not suit the experts' sizes.
    """
    check_format(model.text_config, offer.experts)
    cfg = model.text_config
    count = count_parameters(cfg)
    held = math.ceil(cfg.num_experts / offer.accelerators) * len(cfg.moe_layers)
    own_experts = held * expert_bytes(cfg, offer.experts)
    vision = sum(count_vision(model.vision_config)) if model.vision_config else 0
    dense_total = 2 * (count.dense + vision)
    reserve = int(RESERVE * offer.hbm_bytes)
    request = (
        cfg.max_position_embeddings * cache_bytes_per_token(cfg, offer.cache_bytes)
        + request_state(cfg, offer.cache_bytes, offer.numeric).total
    )

    def with_ranks(ranks: int) -> ServingPlan:
        dense = math.ceil(dense_total / ranks)
        free = offer.hbm_bytes - own_experts - dense - reserve
        return ServingPlan(
            stack_ranks=ranks, stacks=offer.accelerators // ranks, expert_bytes=own_experts,
            dense_bytes=dense, reserve_bytes=reserve, free_bytes=free, request_bytes=request,
            fits=free * ranks >= request,
        )  # fmt: skip

    if offer.stack_ranks is not None:
        return with_ranks(offer.stack_ranks)
    ranks = [n for n in range(1, offer.accelerators + 1) if offer.accelerators % n == 0]
    plans = [with_ranks(n) for n in ranks]
    return next((plan for plan in plans if plan.fits), plans[-1])


def plan_training(model: ModelConfig, offer: Offer) -> TrainingPlan:
    """Training state of all text parameters, with a BF16 copy of the dense weights to compute
    with, alone on the accelerators or with everything but gradients and copies on the hosts."""
    cfg = model.text_config
    count = count_parameters(cfg)
    compute = count.routed_experts // count.per_expert * expert_bytes(cfg, offer.experts)
    compute += 2 * count.dense
    gradient = TRAIN_BYTES["gradient"] * count.total
    offloadable = sum(TRAIN_BYTES.values()) * count.total - gradient
    usable = offer.hbm_bytes - int(RESERVE * offer.hbm_bytes)
    total, on_device = compute + gradient + offloadable, compute + gradient
    by_host = math.ceil(offloadable / offer.host_bytes) if offer.host_bytes else None
    by_device = math.ceil(on_device / usable)
    ranks = offer.accelerators
    minimum = math.ceil(total / usable)
    offloaded = max(by_device, by_host) if by_host is not None else None
    return TrainingPlan(
        state_bytes=total,
        hbm_bytes_offloaded=math.ceil(on_device / ranks),
        host_bytes_offloaded=math.ceil(offloadable / ranks),
        min_accelerators=minimum,
        min_accelerators_offloaded=offloaded,
        fits=minimum <= ranks,
        fits_offloaded=offloaded is not None and offloaded <= ranks,
    )
