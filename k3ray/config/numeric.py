"""`NumericMode`: whether a token's bits are promised, or only its value (design, section 5)."""

from __future__ import annotations

from enum import StrEnum


class NumericMode(StrEnum):
    """How the model computes.

    DETERMINISTIC: log-probability bits depend on prompt, parameters, seed and weight version only.
    FAST: cheaper decode and attention; equal up to rounding.
    """

    DETERMINISTIC = "deterministic"
    FAST = "fast"
