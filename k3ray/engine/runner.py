"""`ModelRunner`: the engine's door to a model, and `Work`, what it is asked to run.

A runner owns the state tensors (slots, pages) and the weights of every live version; the engine
says which span of which sequence runs. `forward` and `score` are called by the engine's thread
only. The real one is `serve_runner.ServeRunner`. Legend: V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from k3ray.errors import K3RayError

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens [start, start + len(tokens)) of one sequence, under its version, on its state."""

    version: str
    slot: int
    pages: tuple[int, ...]
    start: int
    tokens: list[int]


class ModelRunner(Protocol):
    """What the engine needs of a model."""

    def versions(self) -> tuple[str, ...]:
        """Live weight versions."""
        ...

    def plan_version(self) -> int:
        """Version of the placement plan in use; 0 without one."""
        ...

    def zero(self, slot: int, pages: tuple[int, ...]) -> None:
        """Zero the state of a slot and pages."""
        ...

    def forward(self, works: Sequence[Work]) -> list[Logits | K3RayError]:
        """Advance the states; per work the [V] float32 logits of its last token, or the error
        that left its state undefined."""
        ...

    def score(self, work: Work) -> Logits:
        """Advance one state; the [T, V] float32 logits of all its tokens.

        Raises:
            K3RayError: the state is left undefined.
        """
        ...
