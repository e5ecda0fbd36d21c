"""The first version of a fresh line: step 0, initialised from the spec's seed.

Every expert depends on (seed, layer, expert) only, so the model is the same under any partition.
Written shard by shard: at most one layer's experts are in memory at a time.
"""

from __future__ import annotations

import numpy as np
import torch

from k3ray.config.load import config_digest
from k3ray.config.model import TextConfig
from k3ray.model.init import init_dense, init_expert
from k3ray.model.k3 import K3Model
from k3ray.weights.manifest import EntryKind, ShardInfo
from k3ray.weights.names import expert_tensor_name
from k3ray.weights.shard import Array
from k3ray.weights.store import StagedEntry, WeightStore
from k3ray.weights.version import WeightVersion


def write_initial_version(
    store: WeightStore, text: TextConfig, *, line: str, seed: int
) -> WeightVersion:
    """Write and commit version step 0 of `line`.

    Raises:
        StoreError: the disk is full or failing; nothing is visible.
    """
    staged = store.stage(line, EntryKind.VERSION, 0)
    try:
        shards = [_write_dense(store, staged, text, seed)]
        shards += [_write_layer(store, staged, text, layer, seed) for layer in text.moe_layers]
        return store.commit(
            staged, shards, {"model": config_digest(text), "seed": seed, "origin": "init"}
        )
    finally:
        store.discard(staged)


def _write_dense(store: WeightStore, staged: StagedEntry, text: TextConfig, seed: int) -> ShardInfo:
    model = K3Model(text, device=torch.device("cpu"), dtype=torch.float32)
    init_dense(model, seed)
    tensors = {name: _numpy(tensor) for name, tensor in model.state_dict().items()}
    return store.write_shard(staged, "dense", tensors)


def _write_layer(
    store: WeightStore, staged: StagedEntry, text: TextConfig, layer: int, seed: int
) -> ShardInfo:
    tensors: dict[str, Array] = {}
    for expert in range(text.num_experts):
        weights = init_expert(text, layer, expert, seed)
        for matrix, tensor in (
            ("w1", weights.w1_FL), ("w2", weights.w2_LF), ("w3", weights.w3_FL),
        ):  # fmt: skip
            tensors[expert_tensor_name(layer, expert, matrix)] = _numpy(tensor)
    return store.write_shard(staged, f"experts-{layer:03d}", tensors)


def _numpy(tensor: torch.Tensor) -> Array:
    array: Array = np.ascontiguousarray(tensor.detach().numpy())
    return array
