"""Launch sizes per op and device, measured off-line: no autotuning while a model serves.

Nothing here was measured on a GPU yet; the sizes are the usual ones for elementwise work that is
bound by memory. Whoever measures writes the device's row and where its figures lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """Elements per program and warps per program."""

    block: int
    num_warps: int


_ANY = "any"
_SIZES: dict[str, dict[str, Launch]] = {
    "situ_glu": {_ANY: Launch(block=1024, num_warps=4)},
}


def launch_size(op: str, device: torch.device) -> Launch:
    """The sizes of `op` on the device's architecture (such as sm_90), else on any."""
    sizes = _SIZES[op]
    if device.type != "cuda":
        return sizes[_ANY]
    major, minor = torch.cuda.get_device_capability(device)
    return sizes.get(f"sm_{major}{minor}", sizes[_ANY])
