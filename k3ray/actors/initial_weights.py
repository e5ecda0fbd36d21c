"""The first version of a fresh line: step 0, initialised from the spec's seed.

Every expert depends on (seed, layer, expert) only, so the model is the same under any partition.
"""

from __future__ import annotations

import torch

from k3ray.config.model import TextConfig
from k3ray.model.init import init_dense, init_expert
from k3ray.model.k3 import K3Model
from k3ray.model.store_export import write_first_version
from k3ray.weights.names import expert_tensor_name
from k3ray.weights.store import WeightStore
from k3ray.weights.version import WeightVersion


def write_initial_version(
    store: WeightStore, text: TextConfig, *, line: str, seed: int
) -> WeightVersion:
    """Write and commit version step 0 of `line`.

    Raises:
        StoreError: the disk is full or failing; nothing is visible.
    """
    model = K3Model(text, device=torch.device("cpu"), dtype=torch.float32)
    init_dense(model, seed)

    def experts_of(layer: int) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for expert in range(text.num_experts):
            weights = init_expert(text, layer, expert, seed)
            for matrix, tensor in (
                ("w1", weights.w1_FL), ("w2", weights.w2_LF), ("w3", weights.w3_FL),
            ):  # fmt: skip
                tensors[expert_tensor_name(layer, expert, matrix)] = tensor
        return tensors

    return write_first_version(
        store, text, model.state_dict(), experts_of,
        line=line, meta={"seed": seed, "origin": "init"},
    )  # fmt: skip
