"""Which experts a token goes to, with which weights, and the weighted sum of their rows.

Legend: T tokens, E experts, K experts per token, L latent width.
"""

from __future__ import annotations

from typing import Any

import torch

from k3ray.ops.activation import sigmoid
from k3ray.ops.function import call


def route(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, *, top_k: int, scaling: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the top-k of sigmoid(logits) + bias; weights are the sigmoids, renormalised.

    Args:
        logits_TE: [T, E] float32.
        bias_E: [E] float32, for the selection only.
        top_k: K.
        scaling: Factor of the weights.

    Returns:
        (ids [T, K] int64 ascending in every row, weights [T, K] float32).

    Source: architecture.md section 5.
    """
    scores_TE = sigmoid(logits_TE)
    chosen_TK = (scores_TE.detach() + bias_E).topk(top_k, dim=-1).indices
    ids_TK = chosen_TK.sort(dim=-1).values
    picked_TK = scores_TE.gather(1, ids_TK)
    return ids_TK, picked_TK / (picked_TK.sum(-1, keepdim=True) + 1e-20) * scaling


def combine(rows_TKL: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Weighted sum in the order of the rows: acc = acc + w * y, one multiply, one add.

    Args:
        rows_TKL: [T, K, L] float32, in ascending expert id.
        weights_TK: [T, K] float32.

    Returns:
        [T, L] float32.
    """
    return call(_Combine, rows_TKL, weights_TK)  # type: ignore[no-any-return]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TKL: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_TKL, weights_TK)
        acc_TL = rows_TKL[:, 0] * weights_TK[:, :1]
        for index in range(1, rows_TKL.shape[1]):
            acc_TL += rows_TKL[:, index] * weights_TK[:, index : index + 1]
        return acc_TL

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows_TKL, weights_TK = ctx.saved_tensors
        dout_T1L = grads[0].unsqueeze(1)
        return dout_T1L * weights_TK.unsqueeze(-1), (rows_TKL * dout_T1L).sum(-1)
