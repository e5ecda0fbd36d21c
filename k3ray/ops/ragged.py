"""`RaggedLayout`: where the tokens of several documents lie in chunks and convolution windows.

Built once for a batch and shared by all layers. Every document has its own grid of chunks of 64
from its first token; chunks are ordered by their index in the document, then by document with the
longest first, so that step c of the recurrence over chunks is one contiguous slice.
Legend: T tokens, D documents, N chunks, B rows whose window reaches before its document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

CHUNK = 64
"""Tokens in a KDA chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowIndex:
    """Rows gathered from tokens, or from the state left before the document.

    Args:
        token_rows: [R, J] int64 row of the batch (any valid row where the state is meant).
        state_rows: [R, J] int64 row of the flattened [D*taps] state (0 where a token is meant).
        from_token: [R, J, 1] bool.
    """

    token_rows: torch.Tensor
    state_rows: torch.Tensor
    from_token: torch.Tensor

    def gather(self, x_TC: torch.Tensor, state_DWC: torch.Tensor | None) -> torch.Tensor:
        """[R, J, C]; without a state the rows before a document are zero."""
        tokens_RJC = x_TC[self.token_rows]
        if state_DWC is None:
            return torch.where(self.from_token, tokens_RJC, tokens_RJC.new_zeros(()))
        before_RJC = state_DWC.flatten(0, 1)[self.state_rows]
        return torch.where(self.from_token, tokens_RJC, before_RJC)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedLayout:
    """See the module.

    Args:
        cu_seqlens: Document borders.
        lengths: Document lengths.
        chunk_rows_T: [T] int64 row of each token among the N*64 chunk rows.
        num_active: Documents that have a chunk of index 0, 1, ...; not increasing.
        rank_D: [D] int64 place of each document, longest first.
        head_rows_B: [B] int64 tokens closer than `taps` to their document's start.
        heads: Windows of those tokens, `taps` + 1 wide, the token itself last.
        tails: The last `taps` rows of each document.
        taps: Convolution inputs kept before the current one.
        last_chunk_D: [D] int64 place of each document's last chunk among the N.
        tail_open_D111: [D, 1, 1, 1] bool, whether that chunk has fewer than 64 rows.
    """

    cu_seqlens: tuple[int, ...]
    lengths: tuple[int, ...]
    chunk_rows_T: torch.Tensor
    num_active: tuple[int, ...]
    rank_D: torch.Tensor
    head_rows_B: torch.Tensor
    heads: WindowIndex
    tails: WindowIndex
    taps: int
    last_chunk_D: torch.Tensor
    tail_open_D111: torch.Tensor

    @property
    def num_chunks(self) -> int:
        """N."""
        return sum(self.num_active)


def build_layout(
    cu_seqlens: tuple[int, ...], *, taps: int = 3, device: torch.device | str = "cpu"
) -> RaggedLayout:
    """Lay documents out.

    Args:
        cu_seqlens: 0 first, T last, strictly increasing.
        taps: Convolution kernel size - 1.
        device: Where the index tensors go.

    Raises:
        ValueError: the borders are not strictly increasing from 0.
    """
    borders = np.asarray(cu_seqlens, dtype=np.int64)
    lengths = np.diff(borders)
    if len(borders) < 2 or borders[0] != 0 or lengths.min() <= 0:
        raise ValueError(f"cu_seqlens must rise strictly from 0, got {cu_seqlens[:8]}")
    starts = borders[:-1]
    num_docs = len(lengths)
    num_chunks = -(-lengths // CHUNK)
    rank = np.empty(num_docs, dtype=np.int64)
    rank[np.argsort(-num_chunks, kind="stable")] = np.arange(num_docs)
    active = (num_chunks[None, :] > np.arange(num_chunks.max())[:, None]).sum(1)
    first_chunk = np.cumsum(active) - active
    doc = np.repeat(np.arange(num_docs), lengths)
    position = np.arange(borders[-1]) - starts[doc]
    chunk_rows = (first_chunk[position // CHUNK] + rank[doc]) * CHUNK + position % CHUNK
    head_rows = np.flatnonzero(position < taps)
    head_offsets = np.arange(-taps, 1)

    def windows(docs: np.ndarray, positions: np.ndarray) -> WindowIndex:
        from_token = positions >= 0
        return WindowIndex(
            token_rows=to_tensor(starts[docs] + np.maximum(positions, 0)),
            state_rows=to_tensor(np.where(from_token, 0, docs * taps + positions + taps)),
            from_token=to_tensor(from_token[..., None]),
        )

    def to_tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return RaggedLayout(
        cu_seqlens=tuple(cu_seqlens),
        lengths=tuple(int(length) for length in lengths),
        chunk_rows_T=to_tensor(chunk_rows),
        num_active=tuple(int(count) for count in active),
        rank_D=to_tensor(rank),
        head_rows_B=to_tensor(head_rows),
        heads=windows(doc[head_rows][:, None], position[head_rows][:, None] + head_offsets),
        tails=windows(np.arange(num_docs)[:, None], lengths[:, None] + np.arange(-taps, 0)),
        taps=taps,
        last_chunk_D=to_tensor(first_chunk[num_chunks - 1] + rank),
        tail_open_D111=to_tensor((lengths % CHUNK != 0)[:, None, None, None]),
    )
