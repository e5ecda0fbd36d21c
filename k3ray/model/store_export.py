"""Between the weight store (float32, by line and step) and checkpoints in the release's layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from k3ray.config.load import config_digest
from k3ray.config.model import ModelConfig
from k3ray.errors import StoreError
from k3ray.model.checkpoint_codec import read_dense, read_expert, source_of
from k3ray.weights.checkpoint import Checkpoint
from k3ray.weights.checkpoint_writer import write_checkpoint
from k3ray.weights.manifest import EntryKind, ShardInfo
from k3ray.weights.release_layout import ExpertFormat
from k3ray.weights.store import StagedEntry, WeightStore
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
    wanted, found = config_digest(model.text_config), entry.manifest.meta.get("model")
    if found is not None and found != wanted:
        raise StoreError(
            f"{entry.version} is of another model ({str(found)[:12]}, asked for {wanted[:12]})",
            remedy="name the preset it was trained with", version=str(entry.version),
        )  # fmt: skip
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
    staged = store.stage(line, EntryKind.VERSION, 0)
    try:
        dense = {
            name: np.ascontiguousarray(t.numpy()) for name, t in read_dense(checkpoint).items()
        }
        shards = [store.write_shard(staged, "dense", dense)]
        shards += [_write_experts(store, staged, checkpoint, layer) for layer in text.moe_layers]
        meta = {"model": config_digest(text), "origin": str(path.absolute())}
        return store.commit(staged, shards, meta)
    finally:
        store.discard(staged)


def _write_experts(
    store: WeightStore, staged: StagedEntry, checkpoint: Checkpoint, layer: int
) -> ShardInfo:
    tensors = {
        name: np.ascontiguousarray(tensor.numpy())
        for expert in range(checkpoint.model.text_config.num_experts)
        for name, tensor in read_expert(checkpoint, layer, expert).items()
    }
    return store.write_shard(staged, f"experts-{layer:03d}", tensors)
