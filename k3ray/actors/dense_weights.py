"""Dense weights of a committed version, from the store to torch; for stacks and scorers."""

from __future__ import annotations

from pathlib import Path

import torch

from k3ray.weights.names import is_dense_name
from k3ray.weights.store import WeightStore


def read_dense(store_dir: str, *, line: str, version: str) -> dict[str, torch.Tensor]:
    """Read everything but the routed experts, checksums verified; blocking.

    Raises:
        StoreError: the version is not in the store, or its bytes do not match their digest.
    """
    entry = WeightStore(Path(store_dir)).open(line, version)
    arrays = entry.read(name for name in entry.names() if is_dense_name(name))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
