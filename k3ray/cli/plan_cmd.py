"""`k3ray plan`: what a model needs on N accelerators, with the arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from k3ray.config.count import count_parameters
from k3ray.config.model import ModelConfig
from k3ray.config.numeric import ExpertFormat, NumericMode
from k3ray.config.resolve import named_model
from k3ray.errors import ConfigError, PlacementError
from k3ray.placement.memory_plan import (
    GIB,
    TRAIN_BYTES,
    Offer,
    cache_bytes_per_token,
    checkpoint_bytes,
    plan_serving,
    plan_training,
    request_state,
)
from k3ray.weights.release_layout import count_vision

MAX_GIB = 1e6


def plan(
    *,
    preset: Annotated[str | None, typer.Option(help="model preset (default: kimi-k3)")] = None,
    config: Annotated[str | None, typer.Option(help="a release's config.json instead")] = None,
    accelerators: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="ranks of the supernode")
    ] = 64,
    hbm_gib: Annotated[
        float, typer.Option(min=0.001, max=MAX_GIB, help="memory of one, in GiB")
    ] = 141.0,
    host_gib: Annotated[
        float,
        typer.Option(min=0.0, max=MAX_GIB, help="host memory per accelerator for training state"),
    ] = 0.0,
    cache_bits: Annotated[int, typer.Option(help="bits of a cached value: 16 or 32")] = 16,
    experts: Annotated[
        ExpertFormat, typer.Option(help="format of the experts")
    ] = ExpertFormat.MXFP4,
    stack_ranks: Annotated[
        int | None, typer.Option(min=1, help="ranks per attention stack (default: fewest)")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="fast mode: no open chunks")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON")] = False,
) -> None:
    """Parameters, checkpoint bytes, memory per rank, cache, state. Exit status 2 when serving does
    not fit; what training needs is told beside it and decides nothing."""
    for name, value in (("--hbm-gib", hbm_gib), ("--host-gib", host_gib)):
        if math.isnan(value):
            raise ConfigError(f"{name} is not a number", remedy="give GiB", violations=())
    if cache_bits not in (16, 32):
        raise ConfigError(f"--cache-bits {cache_bits}", remedy="give 16 or 32", violations=())
    if stack_ranks is not None and accelerators % stack_ranks:
        raise ConfigError(
            f"--stack-ranks {stack_ranks} does not divide --accelerators {accelerators}",
            remedy="choose a divisor", violations=(),
        )  # fmt: skip
    model = named_model(preset, config, default="kimi-k3")
    offer = Offer(
        accelerators=accelerators, hbm_bytes=int(hbm_gib * GIB), host_bytes=int(host_gib * GIB),
        cache_bytes=cache_bits // 8, experts=experts, stack_ranks=stack_ranks,
        numeric=NumericMode.FAST if fast else NumericMode.DETERMINISTIC,
    )  # fmt: skip
    document = describe(model, offer)
    typer.echo(json.dumps(document, indent=2) if as_json else render(document))
    serving = document["serving"]
    if not serving["fits"]:
        raise PlacementError(
            f"one rank has {gib(offer.hbm_bytes)}; experts {gib(serving['expert_bytes'])} + dense "
            f"weights {gib(serving['dense_bytes'])} + reserve {gib(serving['reserve_bytes'])} leave"
            f" {gib(serving['free_bytes'])} x {serving['stack_ranks']} ranks per stack, and one "
            f"request of full context takes {gib(serving['request_bytes'])}",
            remedy="offer more accelerators or memory, or raise --stack-ranks",
        )


def describe(model: ModelConfig, offer: Offer) -> dict[str, Any]:
    """The plan as a JSON-able document."""
    cfg = model.text_config
    count = count_parameters(cfg)
    tower, projector = count_vision(model.vision_config) if model.vision_config else (0, 0)
    state = request_state(cfg, offer.cache_bytes, offer.numeric)
    serving, training = plan_serving(model, offer), plan_training(model, offer)
    return {
        "accelerators": offer.accelerators,
        "hbm_bytes": offer.hbm_bytes,
        "parameters": {
            "text": count.total, "vision_tower": tower, "projector": projector,
            "active": count.active, "routed_experts": count.routed_experts, "dense": count.dense,
        },
        "checkpoint_bytes": checkpoint_bytes(model),
        "cache_bytes_per_token": cache_bytes_per_token(cfg, offer.cache_bytes),
        "state_bytes_per_request": {**asdict(state), "total": state.total},
        "serving": {**asdict(serving), "requests_per_stack": serving.requests_per_stack},
        "training": {"bytes_per_parameter": dict(TRAIN_BYTES), **asdict(training)},
    }  # fmt: skip


def render(document: dict[str, Any]) -> str:
    """The document for people."""
    parameters, serving = document["parameters"], document["serving"]
    training, state = document["training"], document["state_bytes_per_request"]
    offloaded = training["min_accelerators_offloaded"]
    per_parameter = " + ".join(f"{k} {v}" for k, v in training["bytes_per_parameter"].items())
    lines = [
        "parameters",
        *(f"  {name:<15} {value:>22,}" for name, value in parameters.items()),
        "checkpoint bytes",
        *(f"  {name:<15} {value:>22,}" for name, value in document["checkpoint_bytes"].items()),
        "request",
        f"  cache per token {document['cache_bytes_per_token']:>22,} B",
        *(f"  KDA state, {name:<11} {value:>9,} B" for name, value in state.items()),
        f"serving on {document['accelerators']} x {gib(document['hbm_bytes'])}: "
        f"{serving['stacks']} stacks of {serving['stack_ranks']} ranks",
        f"  experts/rank    {gib(serving['expert_bytes']):>22}",
        f"  dense/rank      {gib(serving['dense_bytes']):>22}",
        f"  reserve/rank    {gib(serving['reserve_bytes']):>22}",
        f"  free/rank       {gib(serving['free_bytes']):>22}",
        f"  full-context requests per stack {serving['requests_per_stack']:>6}",
        f"  serving {'fits' if serving['fits'] else 'DOES NOT FIT'}",
        f"training, for information (float32 {per_parameter} bytes per parameter)",
        f"  all state       {gib(training['state_bytes']):>22}",
        f"  without offload {training['min_accelerators']:>22,} accelerators at least"
        f" ({'fits' if training['fits'] else 'does not fit'})",
        f"  with offload    {gib(training['hbm_bytes_offloaded']):>22} on each, "
        f"{gib(training['host_bytes_offloaded'])} on each host share; "
        + (f"{offloaded:,} accelerators at least" if offloaded else "give --host-gib")
        + f" ({'fits' if training['fits_offloaded'] else 'does not fit'})",
    ]
    return "\n".join(lines)


def gib(size_bytes: int) -> str:
    """Bytes as GiB."""
    return f"{size_bytes / GIB:,.2f} GiB"
