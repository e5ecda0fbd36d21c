"""`K3Model`: a Kimi-K3-shaped language model without its routed experts.

The experts are wherever the `ExpertExecutor` given to each call takes the latents. Parameter names
are the release's without the `language_model.` prefix. `forward_hidden` runs whole documents and
differentiates; `forward_serve` advances sequences by spans over a `ServeState`.
Legend: T tokens, X hidden channels, V vocabulary, S spans.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from k3ray.config.model import TextConfig
from k3ray.config.numeric import NumericMode
from k3ray.model.batch import PackedBatch
from k3ray.model.decoder import Attend, Attention, DecoderLayer, mix
from k3ray.model.executor import ExpertExecutor
from k3ray.model.modules import Linear, Placement, RmsNorm
from k3ray.model.serve_state import SeqSpan, ServeState
from k3ray.model.serve_step import build_step
from k3ray.ops.ragged import build_layout


class K3Model(nn.Module):
    """See the module. Parameters start at zero; `init_dense` or `load_state_dict` fills them.

    Args:
        cfg: Model sizes.
        checkpoint_activations: Recompute each layer in the backward instead of keeping its
            activations; the experts' forward then runs twice.
        device: Where parameters live.
        dtype: Of parameters and activations; what the release keeps in float32 stays so.
        numeric: Of `forward_hidden`; `forward_serve` goes by its state's mode.
    """

    def __init__(
        self,
        cfg: TextConfig,
        *,
        checkpoint_activations: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        numeric: NumericMode = NumericMode.DETERMINISTIC,
    ) -> None:
        super().__init__()
        place = Placement(device=device, dtype=dtype, numeric=numeric)
        self.cfg = cfg
        self.checkpoint_activations = checkpoint_activations
        self.numeric = numeric
        self.model = _Trunk(cfg, place)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size, place)

    def forward_hidden(self, batch: PackedBatch, experts: ExpertExecutor) -> torch.Tensor:
        """Hidden states of whole documents.

        Args:
            batch: Documents; none sees another.
            experts: Must be trainable when a gradient is to be taken.

        Returns:
            [T, X] after the final norm.

        Raises:
            ValueError: the batch's borders are not strictly increasing from 0 to T.
            PeerLostError, DeadlineError: from the executor.
        """
        if batch.cu_seqlens[-1] != batch.num_tokens:
            raise ValueError(f"cu_seqlens end at {batch.cu_seqlens[-1]}, not {batch.num_tokens}")
        layout = build_layout(
            batch.cu_seqlens,
            taps=self.cfg.linear_attn_config.short_conv_kernel_size - 1,
            device=batch.tokens_T.device,
        )

        def attend(attention: Attention, x_TX: torch.Tensor) -> torch.Tensor:
            return attention(x_TX, layout)  # type: ignore[no-any-return]

        return self._run(batch.tokens_T, attend, experts)

    def logits(self, hidden_TX: torch.Tensor) -> torch.Tensor:
        """[T, V] float32 (float64 for a float64 model)."""
        logits: torch.Tensor = self.lm_head(hidden_TX)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.no_grad()
    def forward_serve(
        self,
        tokens_T: torch.Tensor,
        spans: Sequence[SeqSpan],
        state: ServeState,
        experts: ExpertExecutor,
        *,
        all_rows: bool = False,
    ) -> torch.Tensor:
        """Advance sequences by spans; any mix of prefill and decode.

        Args:
            tokens_T: [T] int64, span after span.
            spans: Distinct slots; a span starts where its sequence's last one ended. In fast mode
                a span of one token takes the recurrent KDA form.
            state: Slots and pages, changed in place (left undefined by an error).
            experts: Where the routed experts run.
            all_rows: Logits of every token instead of each span's last.

        Returns:
            [S, V] or [T, V] float32.

        Raises:
            ValueError: spans and tokens do not match, pages do not cover a span, or the state is
                of another numeric mode than the model.
            PeerLostError, DeadlineError: from the executor.
        """
        if state.numeric is not self.numeric:
            raise ValueError(f"a {self.numeric} model cannot serve from a {state.numeric} state")
        step = build_step(spans, state, num_tokens=len(tokens_T))

        def attend(attention: Attention, x_TX: torch.Tensor) -> torch.Tensor:
            return attention.serve(x_TX, step)

        hidden_TX = self._run(tokens_T, attend, experts)
        if not all_rows:
            hidden_TX = hidden_TX.index_select(0, step.last_rows_S)
        return self.logits(hidden_TX)

    def _run(self, tokens_T: torch.Tensor, attend: Attend, experts: ExpertExecutor) -> torch.Tensor:
        trunk = self.model
        current = functional.embedding(tokens_T, trunk.embed_tokens.weight)
        bank: tuple[torch.Tensor, ...] = ()
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for layer in trunk.decoder_layers():
            before = current
            if recompute:
                current = checkpoint(layer, bank, current, attend, experts, use_reentrant=False)
            else:
                current = layer(bank, current, attend, experts)
            if layer.starts_block:
                bank = (*bank, before)
        mixed = mix((*bank, current), trunk.output_attn_res_norm, trunk.output_attn_res_proj)
        return trunk.norm(mixed)  # type: ignore[no-any-return]


class _Trunk(nn.Module):
    """Parameters under the release's `model.` prefix."""

    def __init__(self, cfg: TextConfig, place: Placement) -> None:
        super().__init__()
        self.embed_tokens = Linear(cfg.hidden_size, cfg.vocab_size, place)
        self.layers = nn.ModuleList(
            DecoderLayer(cfg, place, layer=layer) for layer in range(cfg.num_hidden_layers)
        )
        self.output_attn_res_norm = RmsNorm(cfg.hidden_size, place, eps=cfg.rms_norm_eps)
        self.output_attn_res_proj = Linear(cfg.hidden_size, 1, place)
        self.norm = RmsNorm(cfg.hidden_size, place, eps=cfg.rms_norm_eps)

    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers in order, typed."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
