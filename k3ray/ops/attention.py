"""Causal softmax attention: expanded over ragged documents, absorbed over a latent cache.

Legend: T tokens, H heads, D query/key dim, E value dim, S sequences, L tokens per sequence,
J cached keys, C cached channels (latent and shared key part), R latent channels.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from k3ray.ops.ragged import RaggedLayout


def causal_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THE: torch.Tensor,
    *,
    layout: RaggedLayout,
    scale: float,
) -> torch.Tensor:
    """softmax(q k^T scale) v within each document.

    Documents of equal length run as one batch.

    Args:
        q_THD: [T, H, D] float.
        k_THD: [T, H, D] float.
        v_THE: [T, H, E] float, E <= D.
        layout: Of the documents.
        scale: Factor of the scores.

    Returns:
        [T, H, E].
    """
    value_dim = v_THE.shape[-1]
    # The fused CPU kernel wants one head dim; zero value channels cost little beside the rest.
    v_THD = functional.pad(v_THE, (0, q_THD.shape[-1] - value_dim))
    lengths = sorted(set(layout.lengths))
    if len(lengths) == 1:
        return _equal_lengths(q_THD, k_THD, v_THD, lengths[0], scale)[..., :value_dim]
    device = q_THD.device
    parts, rows = [], []
    for length in lengths:
        starts = [
            start
            for start, n in zip(layout.cu_seqlens, layout.lengths, strict=False)
            if n == length
        ]
        index = (
            torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
        ).flatten()
        q, k, v = (x.index_select(0, index) for x in (q_THD, k_THD, v_THD))
        parts.append(_equal_lengths(q, k, v, length, scale))
        rows.append(index)
    order = torch.cat(rows)
    inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=device))
    return torch.cat(parts).index_select(0, inverse)[..., :value_dim]


def latent_attention(
    q_SLHC: torch.Tensor,
    cache_SJC: torch.Tensor,
    positions_SL: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """Absorbed attention: all heads read one shared key row per token.

    Args:
        q_SLHC: [S, L, H, C] queries mapped into the cache's channels.
        cache_SJC: [S, J, C] cached rows by position; rows after a query's position must be finite
            and are not seen.
        positions_SL: [S, L] int64 position of each query.
        latent_dim: R: the first channels are the values.
        scale: Factor of the scores.

    Returns:
        [S, L, H, R] float32 at least.
    """
    seqs, length, heads, channels = q_SLHC.shape
    keys = cache_SJC.shape[1]
    scores = torch.matmul(
        q_SLHC.reshape(seqs, length * heads, channels), cache_SJC.transpose(1, 2)
    ).view(seqs, length, heads, keys)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    hidden = torch.arange(keys, device=cache_SJC.device) > positions_SL[..., None]
    scores.masked_fill_(hidden[:, :, None], float("-inf"))
    exps = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    probs = exps.div_(exps.sum(-1, keepdim=True))
    mixed = torch.matmul(
        probs.view(seqs, length * heads, keys), cache_SJC[..., :latent_dim].to(probs.dtype)
    )
    return mixed.view(seqs, length, heads, latent_dim)


def _equal_lengths(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    """[T, H, D] of T / length documents back to back."""
    q, k, v = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_THD, v_THD))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)
