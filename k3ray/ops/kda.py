"""Kimi Delta Attention: the decay gate, the chunkwise form and the one-token recurrence.

Per head, with S in R^{K x V}: S~ = Diag(exp g_t) S_{t-1}; S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T;
o_t = S_t^T q_t. All arithmetic in float32 at least. Queries come scaled and normalised, keys
normalised. Legend: T tokens, H heads, K key dim, V value dim, D documents, S sequences,
N chunks times heads, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch

from k3ray.ops.activation import sigmoid
from k3ray.ops.function import call
from k3ray.ops.kda_pairs import chunk_pairs, decay
from k3ray.ops.ragged import CHUNK, RaggedLayout


def kda_gate(z_THK: torch.Tensor, a_log_H: torch.Tensor, *, lower_bound: float) -> torch.Tensor:
    """Log decay g = lower_bound * sigmoid(exp(A_log) * z), in (lower_bound, 0).

    Args:
        z_THK: [T, H, K] float32, projection plus dt_bias.
        a_log_H: [H] float32.
        lower_bound: Negative, -5 in K3.

    Returns:
        [T, H, K] float32.

    Source: architecture.md section 2, item 4.
    """
    return sigmoid(z_THK * a_log_H.exp()[:, None]) * lower_bound


def kda_recurrent(
    q_SHK: torch.Tensor,
    k_SHK: torch.Tensor,
    v_SHV: torch.Tensor,
    g_SHK: torch.Tensor,
    beta_SH: torch.Tensor,
    *,
    state_SHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of S sequences.

    Args:
        q_SHK: [S, H, K] float32.
        k_SHK: [S, H, K] float32.
        v_SHV: [S, H, V] float32.
        g_SHK: [S, H, K] float32 log decay.
        beta_SH: [S, H] float32.
        state_SHKV: [S, H, K, V] float32 state before; not changed.

    Returns:
        ([S, H, V] output, [S, H, K, V] state after).
    """
    decayed_SHKV = state_SHKV * g_SHK.exp().unsqueeze(-1)
    recalled_SHV = torch.matmul(k_SHK.unsqueeze(-2), decayed_SHKV).squeeze(-2)
    write_SHV = (v_SHV - recalled_SHV) * beta_SH.unsqueeze(-1)
    new_SHKV = decayed_SHKV + k_SHK.unsqueeze(-1) * write_SHV.unsqueeze(-2)
    return torch.matmul(q_SHK.unsqueeze(-2), new_SHKV).squeeze(-2), new_SHKV


def kda_chunkwise(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    *,
    layout: RaggedLayout,
    state_DHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of ragged documents, in chunks of 64; differentiable in all tensors.

    Only the state passes from chunk to chunk in order; everything else runs for all chunks of all
    documents at once. Tails are padded with g = 0, beta = 0, k = 0, which is neutral.

    Args:
        q_THK: [T, H, K] float32.
        k_THK: [T, H, K] float32.
        v_THV: [T, H, V] float32.
        g_THK: [T, H, K] float32 log decay, <= 0.
        beta_TH: [T, H] float32.
        layout: Of the documents.
        state_DHKV: [D, H, K, V] float32 state before each document; None is zero.

    Returns:
        ([T, H, V] output, [D, H, K, V] state after each document).

    Source: architecture.md section 2.1; Kimi K3 technical report, equations 3 and 4.
    """
    operands = (q_THK, k_THK, v_THV, g_THK, beta_TH)
    out_THV, _, after_DHKV = _chunks(operands, layout, state_DHKV)
    return out_THV, after_DHKV


def kda_from_edges(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    *,
    layout: RaggedLayout,
    state_DHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kda_chunkwise` that advances the state to the last edge only, never into an open chunk.

    A row's output then has the same bits in every call whose documents start at an edge of the same
    grid, however many rows follow it (design, section 5, "One path").

    Args:
        q_THK, k_THK, v_THV, g_THK, beta_TH: As in `kda_chunkwise`; documents start at edges.
        layout: Of the documents.
        state_DHKV: [D, H, K, V] float32 state at each document's first edge.

    Returns:
        ([T, H, V] output, [D, H, K, V] state at each document's last edge).
    """
    operands = (q_THK, k_THK, v_THV, g_THK, beta_TH)
    out_THV, before_NHKV, after_DHKV = _chunks(operands, layout, state_DHKV)
    at_last_chunk_DHKV = before_NHKV.index_select(0, layout.last_chunk_D)
    return out_THV, torch.where(layout.tail_open_D111, at_last_chunk_DHKV, after_DHKV)


def _chunks(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    layout: RaggedLayout,
    state_DHKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([T, H, V] output, [chunks, H, K, V] state before each chunk, [D, H, K, V] state after)."""
    q_THK, k_THK, v_THV, g_THK, beta_TH = operands
    tokens, heads, key_dim = k_THK.shape
    value_dim = v_THV.shape[-1]
    if tokens != layout.cu_seqlens[-1]:
        raise ValueError(f"{tokens} tokens against a layout of {layout.cu_seqlens[-1]}")
    rows = _head_rows(layout, heads)
    q, k, v, g = (_to_chunks(x, rows, layout, heads) for x in (q_THK, k_THK, v_THV, g_THK))
    beta = _to_chunks(beta_TH.unsqueeze(-1), rows, layout, heads)

    kk_NCC, qk_NCC, prefix_NCK, suffix_NCK = chunk_pairs(q, k, g)
    from_start_NCK = decay(prefix_NCK)
    targets = torch.cat((k * from_start_NCK, v), dim=-1) * beta
    solved = torch.linalg.solve_triangular(kk_NCC * beta, targets, upper=False, unitriangular=True)
    w_NCK, u_NCV = torch.split(solved, [key_dim, value_dim], dim=-1)
    to_end_NCK = k * decay(suffix_NCK)
    carried_NK = from_start_NCK[:, -1]

    if state_DHKV is None:
        state_DHKV = v.new_zeros(len(layout.lengths), heads, key_dim, value_dim)
    ranked = torch.empty_like(layout.rank_D).index_copy_(
        0, layout.rank_D, torch.arange(len(layout.lengths), device=layout.rank_D.device)
    )
    before_NKV, values_NCV, after = _carry(
        (w_NCK, u_NCV, to_end_NCK, carried_NK),
        state_DHKV[ranked].flatten(0, 1),
        [count * heads for count in layout.num_active],
    )
    out_NCV = torch.baddbmm(torch.bmm(q * from_start_NCK, before_NKV), qk_NCC, values_NCV)
    out: torch.Tensor = call(_FromRows, out_NCV.flatten(0, 1), rows)
    return (
        out.view(tokens, heads, value_dim),
        before_NKV.view(-1, heads, key_dim, value_dim),
        after.view(-1, heads, key_dim, value_dim)[layout.rank_D],
    )


def _carry(
    terms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    counts: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pass the states through the chunks.

    `terms` are W, U, keys decayed to the chunk's end and the whole chunk's decay, in chunk order;
    `counts` are the chunks of each step, not increasing. Returns the state before every chunk, the
    corrected values of every chunk and the last state of every document, in rank order.
    """
    befores, corrected, finished = [], [], []
    split = [torch.split(term, counts) for term in terms]
    for w, u, to_end, carried in zip(*split, strict=True):
        if len(w) < len(state):
            state, done = torch.split(state, [len(w), len(state) - len(w)])
            finished.append(done)
        befores.append(state)
        values = torch.baddbmm(u, w, state, alpha=-1.0)
        corrected.append(values)
        state = torch.baddbmm(state * carried.unsqueeze(-1), to_end.transpose(1, 2), values)
    finished.append(state)
    return torch.cat(befores), torch.cat(corrected), torch.cat(finished[::-1])


def _head_rows(layout: RaggedLayout, heads: int) -> torch.Tensor:
    """[T*H] row of (token, head) among the rows of [chunks, H, 64]."""
    chunk_T, row_T = layout.chunk_rows_T // CHUNK, layout.chunk_rows_T % CHUNK
    head_H = torch.arange(heads, device=chunk_T.device)
    return ((chunk_T[:, None] * heads + head_H) * CHUNK + row_T[:, None]).flatten()


def _to_chunks(
    x: torch.Tensor, rows: torch.Tensor, layout: RaggedLayout, heads: int
) -> torch.Tensor:
    """[T, H, F] to zero-padded [chunks*H, 64, F]."""
    total = layout.num_chunks * heads * CHUNK
    chunked: torch.Tensor = call(_ToRows, x.flatten(0, 1), rows, total)
    return chunked.view(-1, CHUNK, x.shape[-1])


class _ToRows(torch.autograd.Function):
    """Distinct rows into a larger zeroed tensor; the adjoint is a gather, not a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(total, x.shape[1]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].index_select(0, rows), None, None


class _FromRows(torch.autograd.Function):
    """The adjoint of `_ToRows`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.total = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        dy = grads[0]
        return dy.new_zeros(ctx.total, dy.shape[1]).index_copy_(0, rows, dy), None
