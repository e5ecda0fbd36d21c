"""The KDA attention sublayer: projections, short convolutions, gated delta rule, gated output.

Legend: T tokens, X hidden channels, H heads, K head dim, P = H*K, S spans.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from k3ray.config.model import TextConfig
from k3ray.model.modules import Linear, Placement, RmsNorm
from k3ray.model.serve_step import GridRows, ServeStep
from k3ray.ops.activation import sigmoid, silu
from k3ray.ops.kda import kda_chunkwise, kda_from_edges, kda_gate, kda_recurrent
from k3ray.ops.norm import l2_norm
from k3ray.ops.ragged import RaggedLayout
from k3ray.ops.short_conv import conv_tail, short_conv


class _Operands(NamedTuple):
    """Inputs of the delta rule."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def rows(self, index: torch.Tensor) -> _Operands:
        """The given rows of all five."""
        return _Operands(*(x.index_select(0, index) for x in self))


class _Conv(nn.Module):
    """Weight [P, 1, taps + 1] of one depthwise convolution, float32 as in the release."""

    def __init__(self, channels: int, kernel: int, place: Placement) -> None:
        super().__init__()
        self.weight = place.zeros(channels, 1, kernel, wide=True)


class KdaAttention(nn.Module):
    """Kimi Delta Attention of one layer; architecture.md section 2.

    Args:
        cfg: Model sizes.
        place: Device and dtype.
        index: Place among the KDA layers, the index into the serving state.
    """

    def __init__(self, cfg: TextConfig, place: Placement, *, index: int) -> None:
        super().__init__()
        linear, width = cfg.linear_attn_config, cfg.hidden_size
        self.heads, self.head_dim, self.index = linear.num_heads, linear.head_dim, index
        self.lower_bound = linear.gate_lower_bound
        inner = self.heads * self.head_dim
        self.q_proj = Linear(width, inner, place)
        self.k_proj = Linear(width, inner, place)
        self.v_proj = Linear(width, inner, place)
        kernel = linear.short_conv_kernel_size
        self.q_conv1d = _Conv(inner, kernel, place)
        self.k_conv1d = _Conv(inner, kernel, place)
        self.v_conv1d = _Conv(inner, kernel, place)
        self.f_a_proj = Linear(width, self.head_dim, place)
        self.f_b_proj = Linear(self.head_dim, inner, place)
        self.b_proj = Linear(width, self.heads, place)
        self.A_log = place.zeros(self.heads, wide=True)
        self.dt_bias = place.zeros(inner, wide=True)
        self.o_norm = RmsNorm(self.head_dim, place, eps=cfg.rms_norm_eps, wide=True)
        self.g_proj = Linear(width, inner, place)
        self.o_proj = Linear(inner, width, place)

    def forward(self, x_TX: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
        """[T, X] of whole documents."""
        convolved_TC = short_conv(self._streams(x_TX), self._taps(), layout=layout)
        o_THK, _ = kda_chunkwise(*self._operands(x_TX, convolved_TC), layout=layout)
        return self._output(x_TX, o_THK)

    def serve(self, x_TX: torch.Tensor, step: ServeStep) -> torch.Tensor:
        """[T, X] of spans; advances the slots' states."""
        operands = self._operands(x_TX, self._convolve_spans(x_TX, step))
        if step.grid is not None:
            return self._output(x_TX, self._serve_on_grid(operands, step, step.grid))
        states_NHKV = step.state.recurrent_ANHKV[self.index]
        o_THK = torch.empty_like(operands.v)
        if step.longs is not None:
            part = step.longs
            out, after = kda_chunkwise(
                *operands.rows(part.rows), layout=part.layout, state_DHKV=states_NHKV[part.slots]
            )
            o_THK.index_copy_(0, part.rows, out)
            states_NHKV.index_copy_(0, part.slots, after)
        if step.singles is not None:
            part = step.singles
            out, after = kda_recurrent(
                *operands.rows(part.rows), state_SHKV=states_NHKV[part.slots]
            )
            o_THK.index_copy_(0, part.rows, out)
            states_NHKV.index_copy_(0, part.slots, after)
        return self._output(x_TX, o_THK)

    def _serve_on_grid(self, new: _Operands, step: ServeStep, grid: GridRows) -> torch.Tensor:
        """[T, H, K] by the chunk kernel alone, each span from its last edge on."""
        open_BW = step.state.open_ANRW[self.index].flatten(0, 1)
        states_NHKV = step.state.recurrent_ANHKV[self.index]
        new_TW = torch.cat((*(x.flatten(1) for x in (new.k, new.v, new.g)), new.beta), dim=-1)
        rows = grid.layout.cu_seqlens[-1]
        rows_MW = new_TW.new_empty(rows, new_TW.shape[1])
        rows_MW.index_copy_(0, grid.new_rows_T, new_TW)
        rows_MW.index_copy_(0, grid.open_rows_B, open_BW.index_select(0, grid.open_source_B))
        # Stored rows ask nothing: their queries are zero and their outputs are not read.
        q_MHK = new.q.new_zeros(rows, *new.q.shape[1:]).index_copy_(0, grid.new_rows_T, new.q)
        inner = self.heads * self.head_dim
        k_MP, v_MP, g_MP, beta_MH = torch.split(rows_MW, [inner, inner, inner, self.heads], dim=-1)
        k_MHK, v_MHK, g_MHK = (
            x.reshape(rows, self.heads, self.head_dim) for x in (k_MP, v_MP, g_MP)
        )
        out_MHK, at_edge_SHKV = kda_from_edges(
            q_MHK,
            k_MHK,
            v_MHK,
            g_MHK,
            beta_MH,
            layout=grid.layout,
            state_DHKV=states_NHKV[step.slots_S],
        )
        crossing = grid.crossing_S
        states_NHKV.index_copy_(
            0, step.slots_S.index_select(0, crossing), at_edge_SHKV.index_select(0, crossing)
        )
        open_BW.index_copy_(0, grid.kept_target_T, new_TW.index_select(0, grid.kept_T))
        return out_MHK.index_select(0, grid.new_rows_T)

    def _streams(self, x_TX: torch.Tensor) -> torch.Tensor:
        """[T, 3P] inputs of the convolutions: q, k and v side by side."""
        return torch.cat((self.q_proj(x_TX), self.k_proj(x_TX), self.v_proj(x_TX)), dim=-1)

    def _taps(self) -> torch.Tensor:
        """[3P, J] of all three; one convolution of few rows costs what three would each."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return torch.cat([conv.weight.squeeze(1) for conv in convs])

    def _convolve_spans(self, x_TX: torch.Tensor, step: ServeStep) -> torch.Tensor:
        states_NWC = step.state.conv_ANWC[self.index]
        before_SWC = states_NWC[step.slots_S]
        streams_TC = self._streams(x_TX)
        convolved_TC = short_conv(
            streams_TC, self._taps(), layout=step.layout, state_DWC=before_SWC
        )
        after_SWC = conv_tail(streams_TC, layout=step.layout, state_DWC=before_SWC)
        states_NWC.index_copy_(0, step.slots_S, after_SWC)
        return convolved_TC

    def _operands(self, x_TX: torch.Tensor, convolved_TC: torch.Tensor) -> _Operands:
        tokens = len(convolved_TC)
        apart_3TP = convolved_TC.view(tokens, 3, -1).transpose(0, 1).contiguous()
        q_THK, k_THK, v_THK = silu(apart_3TP).view(3, tokens, self.heads, self.head_dim).unbind()
        wide = self.dt_bias.dtype
        z_TP = self.f_b_proj(self.f_a_proj(x_TX)).to(wide) + self.dt_bias
        return _Operands(
            q=l2_norm(q_THK, scale=self.head_dim**-0.5),
            k=l2_norm(k_THK),
            v=v_THK.to(wide),
            g=kda_gate(
                z_TP.view(-1, self.heads, self.head_dim),
                self.A_log,
                lower_bound=self.lower_bound,
            ),
            beta=sigmoid(self.b_proj(x_TX).to(wide)),
        )

    def _output(self, x_TX: torch.Tensor, o_THK: torch.Tensor) -> torch.Tensor:
        normed_TP = self.o_norm(o_THK).flatten(1)
        gated_TP = normed_TP * sigmoid(self.g_proj(x_TX))
        return self.o_proj(gated_TP.to(x_TX.dtype))  # type: ignore[no-any-return]
