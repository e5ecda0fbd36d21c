"""Forward and backward of routed experts on rows grouped by expert, cut into short pieces.

Every product gets its rows padded with zeros to a multiple of 16, so that a row's bits do not
depend on its batch mates; an expert's rows stay in ascending token order, so that its weight
gradients do not depend on who else shares the process. The functions are generators that yield
between pieces of a few milliseconds: a higher lane may run in between. One path serves decode and
long batches alike: a loop of small products measured no slower than gathered `bmm`.

Legend: E experts held, F inner width, L latent width, N latent rows, P (row, expert) pairs,
M padded rows of all experts.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from k3ray.model.expert_stack import ExpertStack
from k3ray.ops.activation import situ_glu, situ_glu_with_grads
from k3ray.ops.linear import ROW_TILE

PIECE_FLOPS = 5e7
"""Work between two yields: a few milliseconds on one CPU core."""

IntArray = npt.NDArray[np.int32]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situ:
    """The two bounds of the SiTU activation."""

    beta: float
    linear_beta: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Padded rows [start, stop) of one expert, given by its slot in the stack."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Where each pair lies among the padded rows, and the pieces of work.

    Args:
        rows_P: [P] int64 index of the pair's latent row.
        dest_P: [P] int64 padded row of the pair.
        pieces: Blocks in ascending row order, a few milliseconds of work each.
        num_padded: M.
    """

    rows_P: torch.Tensor
    dest_P: torch.Tensor
    pieces: tuple[tuple[Block, ...], ...]
    num_padded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """What the backward of one forward needs; x, gate and up are padded rows."""

    grouping: Grouping
    num_latents: int
    x_ML: torch.Tensor
    gate_MF: torch.Tensor
    up_MF: torch.Tensor


def group_rows(stack: ExpertStack, rows_P: IntArray, experts_P: IntArray) -> Grouping:
    """Sort pairs by expert (stable: token order is kept) and pad each expert's rows.

    Args:
        stack: The experts held.
        rows_P: [P] int32 latent row of each pair.
        experts_P: [P] int32 logical expert of each pair.

    Raises:
        PlanError: an expert is not held here.
    """
    slots_P = stack.slots_of(experts_P)
    order_P = np.argsort(slots_P, kind="stable")
    counts_E = np.bincount(slots_P, minlength=stack.num_experts)
    padded_E = (counts_E + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    starts_E = np.cumsum(padded_E) - padded_E
    firsts_E = np.cumsum(counts_E) - counts_E
    sorted_slots_P = slots_P[order_P]
    dest_P = np.empty(len(slots_P), dtype=np.int64)
    dest_P[order_P] = starts_E[sorted_slots_P] + np.arange(len(slots_P)) - firsts_E[sorted_slots_P]
    return Grouping(
        rows_P=torch.from_numpy(rows_P.astype(np.int64)),
        dest_P=torch.from_numpy(dest_P),
        pieces=_pieces(stack, starts_E, padded_E),
        num_padded=int(padded_E.sum()),
    )


def expert_forward(
    stack: ExpertStack, grouping: Grouping, latents_NL: torch.Tensor, situ: Situ
) -> Generator[None, None, tuple[torch.Tensor, SavedActivations]]:
    """Rows E_e(latent) of every pair.

    Args:
        stack: Weights of the experts held.
        grouping: From `group_rows`.
        latents_NL: [N, L] float32.
        situ: Activation bounds.

    Returns:
        ([P, L] float32 in the pairs' own order, what `expert_backward` needs).
    """
    inner = stack.w1_EFL.shape[1]
    x_ML = _scatter(grouping, latents_NL.index_select(0, grouping.rows_P))
    gate_MF = x_ML.new_empty(grouping.num_padded, inner)
    up_MF = x_ML.new_empty(grouping.num_padded, inner)
    y_ML = torch.empty_like(x_ML)
    for index, piece in enumerate(grouping.pieces):
        if index:
            yield
        start, stop = piece[0].start, piece[-1].stop
        for block in piece:
            x_BL = x_ML[block.start : block.stop]
            torch.mm(x_BL, stack.w1_EFL[block.slot].T, out=gate_MF[block.start : block.stop])
            torch.mm(x_BL, stack.w3_EFL[block.slot].T, out=up_MF[block.start : block.stop])
        hidden_BF = situ_glu(
            gate_MF[start:stop], up_MF[start:stop], beta=situ.beta, linear_beta=situ.linear_beta
        )
        for block in piece:
            torch.mm(
                hidden_BF[block.start - start : block.stop - start],
                stack.w2_ELF[block.slot].T,
                out=y_ML[block.start : block.stop],
            )
    saved = SavedActivations(
        grouping=grouping,
        num_latents=latents_NL.shape[0],
        x_ML=x_ML,
        gate_MF=gate_MF,
        up_MF=up_MF,
    )
    return y_ML.index_select(0, grouping.dest_P), saved


def expert_backward(
    stack: ExpertStack,
    grads: ExpertStack,
    saved: SavedActivations,
    grad_rows_PL: torch.Tensor,
    situ: Situ,
) -> Generator[None, None, torch.Tensor]:
    """Gradient of every pair's latent row; adds the weights' gradients to `grads` in place.

    Args:
        stack: Weights used in the forward.
        grads: Gradient buffers of the same shape.
        saved: From `expert_forward`.
        grad_rows_PL: [P, L] float32, gradient of the forward's rows.
        situ: Activation bounds.

    Returns:
        [P, L] float32; the caller sums the pairs of one token.
    """
    grouping = saved.grouping
    dy_ML = _scatter(grouping, grad_rows_PL)
    dx_ML = torch.empty_like(dy_ML)
    for index, piece in enumerate(grouping.pieces):
        if index:
            yield
        dhidden_BF = _backward_down(stack, piece, dy_ML)
        start, stop = piece[0].start, piece[-1].stop
        gate_BF, up_BF = saved.gate_MF[start:stop], saved.up_MF[start:stop]
        hidden_BF, dgate_BF, dup_BF = situ_glu_with_grads(
            gate_BF, up_BF, dhidden_BF, beta=situ.beta, linear_beta=situ.linear_beta
        )
        for block in piece:
            own = slice(block.start - start, block.stop - start)
            x_BL, dx_BL = saved.x_ML[block.start : block.stop], dx_ML[block.start : block.stop]
            torch.mm(dgate_BF[own], stack.w1_EFL[block.slot], out=dx_BL)
            dx_BL.addmm_(dup_BF[own], stack.w3_EFL[block.slot])
            grads.w1_EFL[block.slot].addmm_(dgate_BF[own].T, x_BL)
            grads.w3_EFL[block.slot].addmm_(dup_BF[own].T, x_BL)
            grads.w2_ELF[block.slot].addmm_(dy_ML[block.start : block.stop].T, hidden_BF[own])
    return dx_ML.index_select(0, grouping.dest_P)


def finish(work: Generator[None, None, T]) -> T:
    """Run a generator to its end without pausing."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: T = stop.value
            return result


def _backward_down(
    stack: ExpertStack, piece: tuple[Block, ...], dy_ML: torch.Tensor
) -> torch.Tensor:
    """Gradient of a piece's hidden rows through w2; [rows of the piece, F]."""
    start, stop = piece[0].start, piece[-1].stop
    dhidden_BF = dy_ML.new_empty(stop - start, stack.w1_EFL.shape[1])
    for block in piece:
        torch.mm(
            dy_ML[block.start : block.stop],
            stack.w2_ELF[block.slot],
            out=dhidden_BF[block.start - start : block.stop - start],
        )
    return dhidden_BF


def _scatter(grouping: Grouping, rows_PL: torch.Tensor) -> torch.Tensor:
    """Pairs' rows into padded rows, zero elsewhere; [M, L]."""
    padded_ML = rows_PL.new_zeros(grouping.num_padded, rows_PL.shape[1])
    padded_ML.index_copy_(0, grouping.dest_P, rows_PL)
    return padded_ML


def _pieces(
    stack: ExpertStack, starts_E: npt.NDArray[np.int64], padded_E: npt.NDArray[np.int64]
) -> tuple[tuple[Block, ...], ...]:
    """Blocks of at most a piece's rows; the cuts depend on one expert's rows alone, so that the
    order of summation of its gradients is the same under any partition."""
    _, inner, latent = stack.w1_EFL.shape
    limit = max(ROW_TILE, int(PIECE_FLOPS / (6 * inner * latent)) // ROW_TILE * ROW_TILE)
    pieces: list[tuple[Block, ...]] = []
    current: list[Block] = []
    rows = 0
    for slot in np.flatnonzero(padded_E):
        first, last = int(starts_E[slot]), int(starts_E[slot] + padded_E[slot])
        for start in range(first, last, limit):
            block = Block(slot=int(slot), start=start, stop=min(last, start + limit))
            if rows + block.stop - block.start > limit and current:
                pieces.append(tuple(current))
                current, rows = [], 0
            current.append(block)
            rows += block.stop - block.start
    if current:
        pieces.append(tuple(current))
    return tuple(pieces)
