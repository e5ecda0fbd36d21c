"""Short causal depthwise convolution over ragged documents, with the state carried between calls.

y_t = sum_j w_j x_{t-taps+j}; before its first token a document sees its state, or zeros. The rows
near a document's start are computed from gathered windows, all others from shifted views, so no
document ever reads another one's values. Legend: T tokens, C channels, D documents, J = taps + 1.
"""

from __future__ import annotations

from typing import Any

import torch

from k3ray.ops.function import call
from k3ray.ops.ragged import RaggedLayout


def short_conv(
    x_TC: torch.Tensor,
    weight_CJ: torch.Tensor,
    *,
    layout: RaggedLayout,
    state_DWC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve.

    Args:
        x_TC: [T, C] float.
        weight_CJ: [C, J] float; the last tap meets the current token.
        layout: Of the documents.
        state_DWC: [D, taps, C] inputs before each document; None is zeros. Takes no gradient.

    Returns:
        [T, C] in the promoted dtype of input and weight.

    Raises:
        ValueError: the kernel size is not the layout's taps + 1.
    """
    if weight_CJ.shape[1] != layout.taps + 1:
        raise ValueError(f"kernel of {weight_CJ.shape[1]} against a layout of {layout.taps} taps")
    return call(_ShortConv, x_TC, weight_CJ, state_DWC, layout)  # type: ignore[no-any-return]


def conv_tail(
    x_TC: torch.Tensor, *, layout: RaggedLayout, state_DWC: torch.Tensor | None
) -> torch.Tensor:
    """The state after the documents: their last inputs, oldest first.

    Args:
        x_TC: [T, C] inputs of the convolution.
        layout: Of the documents.
        state_DWC: [D, taps, C] state before, or None.

    Returns:
        [D, taps, C].
    """
    return layout.tails.gather(x_TC, state_DWC)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: torch.Tensor,
        weight_CJ: torch.Tensor,
        state_DWC: torch.Tensor | None,
        layout: RaggedLayout,
    ) -> torch.Tensor:
        taps_JC = weight_CJ.T.contiguous()
        y_TC = x_TC * taps_JC[-1]
        for back in range(1, min(layout.taps, len(x_TC) - 1) + 1):
            y_TC[back:].addcmul_(x_TC[:-back], taps_JC[-1 - back])
        heads_BJC = layout.heads.gather(x_TC, state_DWC)
        # The same chain of operations as above: a row's bits do not depend on which of the two it
        # took, so a span may be cut anywhere.
        heads_BC = heads_BJC[:, -1] * taps_JC[-1]
        for back in range(1, layout.taps + 1):
            heads_BC.addcmul_(heads_BJC[:, -1 - back], taps_JC[-1 - back])
        y_TC[layout.head_rows_B] = heads_BC
        ctx.save_for_backward(x_TC, weight_CJ, heads_BJC)
        ctx.layout = layout
        return y_TC

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x_TC, weight_CJ, heads_BJC = ctx.saved_tensors
        layout: RaggedLayout = ctx.layout
        taps_JC = weight_CJ.T.contiguous()
        dheads_BC = grads[0][layout.head_rows_B]
        dy_TC = grads[0].index_fill(0, layout.head_rows_B, 0.0)
        dtaps_JC = (heads_BJC * dheads_BC[:, None]).sum(0)
        dtaps_JC[-1] += (x_TC * dy_TC).sum(0)
        dx_TC = dy_TC * taps_JC[-1]
        for back in range(1, min(layout.taps, len(x_TC) - 1) + 1):
            dx_TC[:-back].addcmul_(dy_TC[back:], taps_JC[-1 - back])
            dtaps_JC[-1 - back] += (x_TC[:-back] * dy_TC[back:]).sum(0)
        dwindow_BJC = (dheads_BC[:, None] * taps_JC) * layout.heads.from_token
        dx_TC.index_add_(0, layout.heads.token_rows.flatten(), dwindow_BJC.flatten(0, 1))
        return dx_TC.to(x_TC.dtype), dtaps_JC.T.to(weight_CJ.dtype), None, None
