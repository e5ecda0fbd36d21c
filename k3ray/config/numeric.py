"""`NumericMode`: whether a token's bits are promised, or only its value (design, section 5).
`ExpertFormat`: the numbers that routed experts are made of."""

from __future__ import annotations

from enum import StrEnum


class NumericMode(StrEnum):
    """How the model computes.

    DETERMINISTIC: log-probability bits depend on prompt, parameters, seed and weight version only.
    FAST: cheaper decode and attention; equal up to rounding.
    """

    DETERMINISTIC = "deterministic"
    FAST = "fast"


class ExpertFormat(StrEnum):
    """Numbers of the routed experts: in a checkpoint, and in the forward of a line that trains."""

    FP32 = "fp32"
    BF16 = "bf16"
    MXFP4 = "mxfp4"
