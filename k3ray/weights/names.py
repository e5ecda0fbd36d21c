"""Tensor names of the store: the release's names without the `language_model.` prefix.

Routed experts are three matrices each (`w1`, `w3` in, `w2` out); optimizer moments carry a suffix.
No torch here: planners and the controller read names too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EXPERT_MATRICES = ("w1", "w2", "w3")
"""The matrices of one routed expert, in the order in which they are stored."""

MOMENT_SUFFIXES = (".adam_m", ".adam_v")
"""Suffixes of AdamW's first and second moment beside the master tensor."""

_EXPERT = re.compile(
    r"^model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight"
    r"(\.adam_[mv])?$"
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ExpertTensor:
    """Which matrix of which routed expert a name means; `moment` is "" or a moment's suffix."""

    layer: int
    expert: int
    matrix: str
    moment: str = ""


def expert_tensor_name(layer: int, expert: int, matrix: str, moment: str = "") -> str:
    """Name of one matrix of one routed expert.

    >>> expert_tensor_name(3, 7, "w1")
    'model.layers.3.block_sparse_moe.experts.7.w1.weight'
    """
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight{moment}"


def parse_expert_tensor(name: str) -> ExpertTensor | None:
    """The expert matrix that `name` means, or None for every other tensor.

    >>> parse_expert_tensor("model.layers.3.block_sparse_moe.experts.7.w1.weight").expert
    7
    >>> parse_expert_tensor("lm_head.weight") is None
    True
    """
    match = _EXPERT.match(name)
    if match is None:
        return None
    layer, expert, matrix, moment = match.groups()
    return ExpertTensor(layer=int(layer), expert=int(expert), matrix=matrix, moment=moment or "")


def expert_tensor_names(layer: int, expert: int, moment: str = "") -> tuple[str, ...]:
    """Names of all matrices of one routed expert."""
    return tuple(expert_tensor_name(layer, expert, matrix, moment) for matrix in EXPERT_MATRICES)


def is_dense_name(name: str) -> bool:
    """Whether `name` is a weight outside the routed experts (moments are not weights)."""
    return parse_expert_tensor(name) is None and not name.endswith(MOMENT_SUFFIXES)
