"""Where the routed experts run: the protocol between a MoE layer and its experts.

The stack sends latents and expert ids, and gets back one unweighted row per (token, expert); the
stack itself weighs and sums them in ascending expert id. Legend: T tokens, K experts per token,
L latent width.
"""

from __future__ import annotations

from typing import Protocol

import torch


class ExpertExecutor(Protocol):
    """Forward only: serving, scoring, rollout. Bound to one weight version by its maker."""

    def forward(
        self, layer: int, latents_TL: torch.Tensor, expert_ids_TK: torch.Tensor
    ) -> torch.Tensor:
        """Expert outputs.

        Args:
            layer: 0-based decoder layer.
            latents_TL: [T, L] float32.
            expert_ids_TK: [T, K] int64 logical expert ids, distinct in a row.

        Returns:
            [T, K, L] float32, unweighted, row (t, k) = E_{ids[t, k]}(latents[t]).

        Raises:
            DeadlineError, PeerLostError: no holder answered and none was rebuilt in time.
        """
        ...


class TrainableExpertExecutor(ExpertExecutor, Protocol):
    """Forward and backward of one micro-batch of one step attempt (bound by its maker).

    `forward` of a layer may be called again with equal arguments (activation checkpointing)
    before its `backward`; the last call counts.
    """

    def backward(self, layer: int, grad_rows_TKL: torch.Tensor) -> torch.Tensor:
        """Gradient of the latents.

        Accumulates the experts' weight gradients where the experts live.

        Args:
            layer: as in `forward`, which must have run for this layer.
            grad_rows_TKL: [T, K, L] float32, gradient of `forward`'s result.

        Returns:
            [T, L] float32.
        """
        ...
