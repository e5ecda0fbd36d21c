"""Into the weight store (float32, by line and step) and out of it, as a release's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from k3ray.config.load import config_digest
from k3ray.config.model import ModelConfig, TextConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.errors import StoreError
from k3ray.model.checkpoint_codec import read_dense, read_expert, source_of
from k3ray.weights.checkpoint import Checkpoint
from k3ray.weights.checkpoint_writer import write_checkpoint
from k3ray.weights.manifest import EntryKind, Meta
from k3ray.weights.shard import Array
from k3ray.weights.store import WeightStore
from k3ray.weights.version import WeightVersion


def export_version(
    store: WeightStore,
    out: Path,
    *,
    line: str,
    version: str | None,
    model: ModelConfig,
    experts: ExpertFormat,
    overwrite: bool = False,
) -> WeightVersion:
    """Write a published version as a checkpoint; returns which.

    Raises:
        StoreError: there is no such version, or it is of another model.
        CheckpointError, ConfigError: see `write_checkpoint`.
    """
    entry = store.latest(line) if version is None else store.open(line, version)
    if entry is None:
        raise StoreError(
            f"line {line} has no published version", remedy="train and publish first", line=line
        )
    entry.require_model(config_digest(model.text_config))
    text_only = model.model_copy(update={"vision_config": None})

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(entry.read([name])[name])

    write_checkpoint(out, text_only, experts, source_of(read), overwrite=overwrite)
    return entry.version


def import_checkpoint(store: WeightStore, path: Path, *, line: str) -> WeightVersion:
    """Make a checkpoint the first version (step 0) of a line; one layer's experts at a time.

    Raises:
        CheckpointError: it is not whole; nothing is visible.
        StoreError: the disk is full or failing; nothing is visible.
    """
    checkpoint = Checkpoint.open(path)
    text = checkpoint.model.text_config

    def experts_of(layer: int) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for expert in range(text.num_experts)
            for name, tensor in read_expert(checkpoint, layer, expert).items()
        }

    return write_first_version(
        store, text, read_dense(checkpoint), experts_of,
        line=line, meta={"origin": str(path.absolute())},
    )  # fmt: skip


def write_first_version(
    store: WeightStore,
    text: TextConfig,
    dense: Mapping[str, torch.Tensor],
    experts_of: Callable[[int], Mapping[str, torch.Tensor]],
    *,
    line: str,
    meta: Meta,
) -> WeightVersion:
    """Write and commit version step 0 of `line`, at most one layer's experts in memory.

    Args:
        store: Where to.
        text: Model sizes.
        dense: Everything but the routed experts, float32, by name.
        experts_of: Gives the routed experts of a layer, float32, by name; asked layer by layer.
        line: The line.
        meta: Facts for the manifest; the model's digest is added.

    Raises:
        StoreError: the disk is full or failing; nothing is visible.
    """
    staged = store.stage(line, EntryKind.VERSION, 0)
    try:
        shards = [store.write_shard(staged, "dense", _arrays(dense))]
        shards += [
            store.write_shard(staged, f"experts-{layer:03d}", _arrays(experts_of(layer)))
            for layer in text.moe_layers
        ]
        return store.commit(staged, shards, {"model": config_digest(text), **meta})
    finally:
        store.discard(staged)


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(t.detach().numpy()) for name, t in tensors.items()}
