"""The mix of Block Attention Residuals: softmax-weighted sum of un-normalised sources, per token.

score_i = w . v_i * rsqrt(mean(v_i^2) + eps) with w = norm * pseudo-query; p = softmax over sources;
out = sum_i p_i v_i. In float32 at least. Legend: T tokens, H channels, N sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from k3ray.ops.activation import wide_dtype
from k3ray.ops.function import call
from k3ray.ops.linear import row_linear

_FEW_ROWS = 64
"""Up to here one call for all sources is cheaper than one for each, though it copies them."""


def attnres_mix(
    sources: Sequence[torch.Tensor], weight_H: torch.Tensor, *, eps: float = 1e-5
) -> torch.Tensor:
    """Mix sources.

    Args:
        sources: N >= 1 tensors [T, H] of one dtype.
        weight_H: [H] norm weight times pseudo-query.
        eps: Inside the root of the key norm.

    Returns:
        [T, H] in the dtype of the sources.

    Source: architecture.md section 4; arXiv 2607.24653, section 2.2.
    """
    return call(_AttnResMix, weight_H, eps, *sources)  # type: ignore[no-any-return]


class _AttnResMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight_H: torch.Tensor, eps: float, *sources: torch.Tensor
    ) -> torch.Tensor:
        dtype = wide_dtype(sources[0].dtype)
        weight = weight_H.to(dtype)
        wide = [source.to(dtype) for source in sources]
        # A product with one column, padded like all others: `v @ weight` changes bits with T.
        if len(wide[0]) <= _FEW_ROWS:  # the same row operations, on all sources at once
            all_NTH = torch.cat(wide)
            inv_TN = all_NTH.square().mean(-1).view(len(wide), -1).T.contiguous()
            dots = row_linear(all_NTH, weight[None])
            score_TN = dots.view(len(wide), -1).T.contiguous()
        else:
            inv_TN = torch.stack([v.square().mean(-1) for v in wide], dim=-1)
            score_TN = torch.cat([row_linear(v, weight[None]) for v in wide], dim=-1)
        score_TN.mul_(inv_TN.add_(eps).rsqrt_())
        exps_TN = (score_TN - score_TN.amax(-1, keepdim=True)).exp_()
        prob_TN = exps_TN / exps_TN.sum(-1, keepdim=True)
        out_TH = wide[0] * prob_TN[:, :1]
        for index, v in enumerate(wide[1:], start=1):
            out_TH.addcmul_(v, prob_TN[:, index : index + 1])
        ctx.save_for_backward(weight_H, inv_TN, score_TN, prob_TN, *sources)
        return out_TH.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight_H, inv_TN, score_TN, prob_TN, *sources = ctx.saved_tensors
        dtype = prob_TN.dtype
        dout_TH, weight = grads[0].to(dtype), weight_H.to(dtype)
        wide = [source.to(dtype) for source in sources]
        dprob_TN = torch.stack([(dout_TH * v).sum(-1) for v in wide], dim=-1)
        dscore_TN = prob_TN * (dprob_TN - (prob_TN * dprob_TN).sum(-1, keepdim=True))
        # score = (w . v) inv(v): its gradient is inv w - (score inv^2 / H) v.
        ddot_TN = dscore_TN * inv_TN
        along_TN = dscore_TN * score_TN * inv_TN.square() / -weight.shape[0]
        dweight = torch.zeros_like(weight)
        dsources = []
        for index, v in enumerate(wide):
            own = slice(index, index + 1)
            dweight += ddot_TN[:, index] @ v
            dv_TH = dout_TH * prob_TN[:, own]
            dv_TH.addcmul_(v, along_TN[:, own]).addcmul_(ddot_TN[:, own], weight)
            dsources.append(dv_TH.to(sources[index].dtype))
        return dweight.to(weight_H.dtype), None, *dsources
