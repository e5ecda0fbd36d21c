"""`ServeStep`: the index arithmetic of one serving batch, done once and used by every layer.

Legend: T tokens of the batch, S spans, P pages of a span, J cached keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from k3ray.config.numeric import NumericMode
from k3ray.model.serve_state import OPEN_ROWS, SeqSpan, ServeState
from k3ray.ops.ragged import CHUNK, RaggedLayout, build_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """Some of the spans: their rows in the batch and their slots."""

    rows: torch.Tensor
    slots: torch.Tensor
    layout: RaggedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRows:
    """Open chunks and new tokens of all spans, laid out from edge to edge.

    Args:
        layout: Of the spans, each from the edge before its start to its end.
        new_rows_T: [T] int64 row of each token of the batch.
        open_rows_B: [B] int64 row of each stored row of an open chunk.
        open_source_B: [B] int64 where it lies among the rows of all slots' open chunks.
        kept_T: [K] int64 tokens of the batch that stay in an open chunk.
        kept_target_T: [K] int64 where they go among the rows of all slots' open chunks.
        crossing_S: [X] int64 spans whose end lies behind another edge than their start.
    """

    layout: RaggedLayout
    new_rows_T: torch.Tensor
    open_rows_B: torch.Tensor
    open_source_B: torch.Tensor
    kept_T: torch.Tensor
    kept_target_T: torch.Tensor
    crossing_S: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Spans of one length, attended to together.

    Args:
        rows_SL: [S, L] int64 rows of the batch.
        positions_SL: [S, L] int64 positions in the sequences.
        pages_SP: [S, P] int64 pages, padded with page 0.
        unused_SJ: [S, J] bool, cached rows that belong to nobody here.
    """

    rows_SL: torch.Tensor
    positions_SL: torch.Tensor
    pages_SP: torch.Tensor
    unused_SJ: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeStep:
    """One serving batch over a state.

    Args:
        state: What the sequences left behind; changed in place by the layers.
        slots_S: [S] int64.
        layout: Of all spans, for the convolutions.
        grid: Deterministic mode: all spans on the grid; None otherwise.
        singles: Fast mode: spans of one token (recurrent KDA), or None.
        longs: Fast mode: longer spans (chunkwise KDA), or None.
        groups: All spans by length, for attention.
        page_rows_T: [T] int64 row of each token among the rows of all pages.
        last_rows_S: [S] int64 last row of each span.
    """

    state: ServeState
    slots_S: torch.Tensor
    layout: RaggedLayout
    grid: GridRows | None
    singles: RowSet | None
    longs: RowSet | None
    groups: tuple[AttentionGroup, ...]
    page_rows_T: torch.Tensor
    last_rows_S: torch.Tensor


def build_step(spans: Sequence[SeqSpan], state: ServeState, *, num_tokens: int) -> ServeStep:
    """Check the spans and compute the indices.

    Args:
        spans: In the order of their tokens in the batch; distinct slots.
        state: Where slots and pages live.
        num_tokens: T.

    Raises:
        ValueError: lengths do not add up to T, a slot occurs twice, or pages do not cover a span.
    """
    device = state.latents_MGSC.device
    lengths = [span.length for span in spans]
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    _check(spans, state, num_tokens=num_tokens)
    page_rows = []
    for span in spans:
        positions = np.arange(span.start, span.start + span.length)
        pages = np.asarray(span.pages, dtype=np.int64)[positions // state.page_size]
        page_rows.append(pages * state.page_size + positions % state.page_size)
    taps = state.conv_ANWC.shape[2]

    def row_set(chosen: list[int]) -> RowSet | None:
        if not chosen:
            return None
        rows = np.concatenate([np.arange(borders[i], borders[i + 1]) for i in chosen])
        inner = tuple(int(n) for n in np.cumsum([0, *(lengths[i] for i in chosen)]))
        return RowSet(
            rows=torch.from_numpy(rows).to(device),
            slots=torch.tensor([spans[i].slot for i in chosen], device=device),
            layout=build_layout(inner, taps=taps, device=device),
        )

    on_grid = state.numeric is NumericMode.DETERMINISTIC
    return ServeStep(
        state=state,
        slots_S=torch.tensor([span.slot for span in spans], device=device),
        layout=build_layout(tuple(int(n) for n in borders), taps=taps, device=device),
        grid=_grid(spans, taps, device) if on_grid else None,
        singles=None if on_grid else row_set([i for i, n in enumerate(lengths) if n == 1]),
        longs=None if on_grid else row_set([i for i, n in enumerate(lengths) if n > 1]),
        groups=tuple(
            _group([i for i, n in enumerate(lengths) if n == length], spans, borders, state)
            for length in sorted(set(lengths))
        ),
        page_rows_T=torch.from_numpy(np.concatenate(page_rows)).to(device),
        last_rows_S=torch.from_numpy(borders[1:] - 1).to(device),
    )


def _grid(spans: Sequence[SeqSpan], taps: int, device: torch.device) -> GridRows:
    new_rows, open_rows, open_source, kept, kept_target = [], [], [], [], []
    borders, first_token = [0], 0
    for span in spans:
        num_open, end = span.start % CHUNK, span.start + span.length
        base = borders[-1]
        new_rows.append(np.arange(base + num_open, base + num_open + span.length))
        open_rows.append(np.arange(base, base + num_open))
        open_source.append(span.slot * OPEN_ROWS + np.arange(num_open))
        positions = np.arange(max(span.start, end - end % CHUNK), end)
        kept.append(first_token + positions - span.start)
        kept_target.append(span.slot * OPEN_ROWS + positions % CHUNK)
        borders.append(base + num_open + span.length)
        first_token += span.length
    crossing = [i for i, s in enumerate(spans) if (s.start + s.length) // CHUNK > s.start // CHUNK]

    def joined(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return GridRows(
        layout=build_layout(tuple(borders), taps=taps, device=device),
        new_rows_T=joined(new_rows),
        open_rows_B=joined(open_rows),
        open_source_B=joined(open_source),
        kept_T=joined(kept),
        kept_target_T=joined(kept_target),
        crossing_S=torch.tensor(crossing, dtype=torch.int64, device=device),
    )


def _check(spans: Sequence[SeqSpan], state: ServeState, *, num_tokens: int) -> None:
    if not spans or any(span.length < 1 for span in spans):
        raise ValueError("a serving batch needs at least one span of at least one token")
    if sum(span.length for span in spans) != num_tokens:
        raise ValueError(f"spans of {[s.length for s in spans]} tokens against {num_tokens}")
    if len({span.slot for span in spans}) != len(spans):
        raise ValueError(f"slots must be distinct, got {[span.slot for span in spans]}")
    for span in spans:
        held = len(span.pages) * state.page_size
        if held < span.start + span.length:
            raise ValueError(
                f"pages of slot {span.slot} hold {held} tokens, {span.start + span.length} needed"
            )


def _group(
    chosen: list[int], spans: Sequence[SeqSpan], borders: np.ndarray, state: ServeState
) -> AttentionGroup:
    size, device = state.page_size, state.latents_MGSC.device
    length = spans[chosen[0]].length
    starts = np.array([spans[i].start for i in chosen], dtype=np.int64)
    offsets = np.arange(length)
    num_pages = int(-(-(starts.max() + length) // size))
    pages = np.zeros((len(chosen), num_pages), dtype=np.int64)
    for place, index in enumerate(chosen):
        own = spans[index].pages[:num_pages]
        pages[place, : len(own)] = own
    keys = np.arange(num_pages * size)
    return AttentionGroup(
        rows_SL=torch.from_numpy(borders[chosen][:, None] + offsets).to(device),
        positions_SL=torch.from_numpy(starts[:, None] + offsets).to(device),
        pages_SP=torch.from_numpy(pages).to(device),
        unused_SJ=torch.from_numpy(keys >= (starts + length)[:, None]).to(device),
    )
