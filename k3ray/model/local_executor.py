"""`LocalExecutor`: the experts of one version in this process; the reference of the remote one."""

from __future__ import annotations

import numpy as np
import torch

from k3ray.model.dispatch import pairs_of
from k3ray.model.expert_bank import ExpertBank
from k3ray.model.expert_math import finish


class LocalExecutor:
    """An `ExpertExecutor` over an `ExpertBank` that holds every expert.

    Args:
        bank: Where the version is loaded.
        version: Its text.
    """

    def __init__(self, bank: ExpertBank, *, version: str) -> None:
        self._bank = bank
        self._version = version

    def forward(
        self, layer: int, latents_TL: torch.Tensor, expert_ids_TK: torch.Tensor
    ) -> torch.Tensor:
        """See `ExpertExecutor.forward`."""
        num_tokens, top_k = expert_ids_TK.shape
        rows_P, experts_P = pairs_of(expert_ids_TK.cpu().numpy())
        rows_PL = finish(
            self._bank.forward(
                layer,
                self._version,
                latents_TL.detach(),
                rows_P.astype(np.int32),
                experts_P.astype(np.int32),
            )
        )
        return rows_PL.view(num_tokens, top_k, -1)
