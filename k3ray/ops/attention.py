"""Causal softmax attention: expanded over ragged documents, absorbed over a latent cache.

Legend: T tokens, H heads, D query/key dim, E value dim, S sequences, L tokens per sequence,
J cached keys, C cached channels (latent and shared key part), R latent channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch.nn import functional

from k3ray.ops.linear import ROW_TILE
from k3ray.ops.ragged import CHUNK, RaggedLayout

QUERY_ROWS = 1024
"""Rows of queries (token, head) whose scores over all pages are held at once."""


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

    def attend(q_SLHD: torch.Tensor, k_SLHD: torch.Tensor, v_SLHD: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_SLHD, k_SLHD, v_SLHD))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.transpose(1, 2)

    return _by_length((q_THD, k_THD, v_THD), layout, attend)[..., :value_dim]


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


def paged_attention(
    q_SLHC: torch.Tensor,
    pages_SPJC: torch.Tensor,
    positions_SL: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """`latent_attention` whose bits do not depend on how many keys or queries there are.

    Every page of 64 keys gets its own products, with query rows padded to a multiple of 16; the
    maximum over all keys is exact, and the pages' sums are added in ascending order, so that pages
    after a query add an exact zero. Differentiable.

    Args:
        q_SLHC: [S, L, H, C] queries mapped into the cache's channels, float32 at least.
        pages_SPJC: [S, P, J, C] cached rows, page p at positions p*J and on, of the same dtype;
            rows after a query's position must be finite and are not seen.
        positions_SL: [S, L] int64 position of each query.
        latent_dim: R: the first channels are the values.
        scale: Factor of the scores.

    Returns:
        [S, L, H, R].

    Source: design, section 5, "One path".
    """
    length, heads = q_SLHC.shape[1:3]
    step = max(1, QUERY_ROWS // heads)
    if length <= step:
        return _pages_block(q_SLHC, pages_SPJC, positions_SL, latent_dim, scale)
    blocks = []
    for start in range(0, length, step):
        own = slice(start, start + step)
        positions = positions_SL[:, own]
        seen = int(positions.max()) // pages_SPJC.shape[2] + 1
        blocks.append(
            _pages_block(q_SLHC[:, own], pages_SPJC[:, :seen], positions, latent_dim, scale)
        )
    return torch.cat(blocks, dim=1)


def documents_attention(
    q_THC: torch.Tensor,
    rows_TC: torch.Tensor,
    *,
    layout: RaggedLayout,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """`paged_attention` within each of several whole documents; differentiable.

    Args:
        q_THC: [T, H, C] queries mapped into the cache's channels, float32 at least.
        rows_TC: [T, C] what a cache would hold of the tokens, of the same dtype.
        layout: Of the documents.
        latent_dim: R: the first channels are the values.
        scale: Factor of the scores.

    Returns:
        [T, H, R].
    """

    def attend(q_SLHC: torch.Tensor, rows_SLC: torch.Tensor) -> torch.Tensor:
        docs, length, channels = rows_SLC.shape
        padded_SNC = functional.pad(rows_SLC, (0, 0, 0, -length % CHUNK))
        return paged_attention(
            q_SLHC,
            padded_SNC.view(docs, -1, CHUNK, channels),
            torch.arange(length, device=q_SLHC.device).expand(docs, length),
            latent_dim=latent_dim,
            scale=scale,
        )

    return _by_length((q_THC, rows_TC), layout, attend)


def _pages_block(
    q_SLHC: torch.Tensor,
    pages_SPJC: torch.Tensor,
    positions_SL: torch.Tensor,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """`paged_attention` of few enough queries to hold all their scores."""
    seqs, length, heads, channels = q_SLHC.shape
    _, pages, size, _ = pages_SPJC.shape
    rows = length * heads
    padding = -rows % ROW_TILE
    q_SMC = functional.pad(q_SLHC.reshape(seqs, rows, channels), (0, 0, 0, padding))
    position_SM = functional.pad(positions_SL.repeat_interleave(heads, dim=1), (0, padding))
    key_J = torch.arange(size, device=q_SLHC.device)
    scores = []
    for page in range(pages):
        products_SMJ = torch.bmm(q_SMC, pages_SPJC[:, page].transpose(1, 2)) * scale
        hidden_SMJ = key_J + page * size > position_SM[..., None]
        scores.append(products_SMJ.masked_fill(hidden_SMJ, float("-inf")))
    top_SM1 = torch.stack([s.detach().amax(-1) for s in scores]).amax(0).unsqueeze(-1)

    def sums(page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A page's part of the denominator [S, M, 1] and of the numerator [S, M, R]."""
        exps_SMJ = (scores[page] - top_SM1).exp()
        values_SJR = pages_SPJC[:, page, :, :latent_dim]
        return exps_SMJ.sum(-1, keepdim=True), torch.bmm(exps_SMJ, values_SJR)

    total_SM1, mixed_SMR = reduce(
        lambda left, right: (left[0] + right[0], left[1] + right[1]), map(sums, range(pages))
    )
    return (mixed_SMR / total_SM1)[:, :rows].reshape(seqs, length, heads, latent_dim)


def _by_length(
    tensors_T: tuple[torch.Tensor, ...],
    layout: RaggedLayout,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Run `attend` once for all documents of each length.

    Args:
        tensors_T: Each [T, ...].
        layout: Of the documents.
        attend: Takes them as [S, L, ...] of S documents of length L; returns [S, L, ...].

    Returns:
        [T, ...] of what `attend` returned.
    """
    lengths = sorted(set(layout.lengths))
    if len(lengths) == 1:
        return attend(*(x.reshape(-1, lengths[0], *x.shape[1:]) for x in tensors_T)).flatten(0, 1)
    device = tensors_T[0].device
    parts, indices = [], []
    for length in lengths:
        starts = [
            start
            for start, n in zip(layout.cu_seqlens, layout.lengths, strict=False)
            if n == length
        ]
        index_SL = torch.tensor(starts, device=device)[:, None] + torch.arange(
            length, device=device
        )
        parts.append(attend(*(x[index_SL] for x in tensors_T)).flatten(0, 1))
        indices.append(index_SL.flatten())
    order = torch.cat(indices)
    inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=device))
    return torch.cat(parts).index_select(0, inverse)
