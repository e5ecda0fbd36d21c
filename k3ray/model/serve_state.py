"""Tensors that sequences leave behind while they are served: KDA slots and MLA pages.

A slot holds one sequence's KDA state (recurrent, convolution, and in deterministic mode the open
chunk) in every KDA layer; a page holds the latents of 64 consecutive tokens in every MLA layer.
Who owns which slot and page is the engine's business; nothing is allocated here. Legend: A KDA
layers, M MLA layers, N slots, G pages, H heads, K key dim, V value dim, C latent channels of the
cache, P = H*K, R = 63 rows of an open chunk, W = 3P + H values of such a row (k, v, g, beta).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3ray.config.model import LayerKind, TextConfig
from k3ray.config.numeric import NumericMode
from k3ray.ops.ragged import CHUNK

OPEN_ROWS = CHUNK - 1
"""Rows of an open chunk: the 64th closes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqSpan:
    """Consecutive tokens of one sequence in a serving batch.

    Args:
        slot: KDA slot of the sequence.
        pages: Pages of the sequence in ascending order; they cover `start + length` tokens.
        start: Position of the first token, 0-based.
        length: Number of tokens, at least 1.
    """

    slot: int
    pages: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSnapshot:
    """A copy of one slot: recurrent [A, H, K, V] float32, convolution [A, 3, 3P] and, in
    deterministic mode, open chunk [A, 1, R, W] float32 (fast mode: no rows of it)."""

    recurrent_AHKV: torch.Tensor
    conv_AWC: torch.Tensor
    open_A1RW: torch.Tensor


class ServeState:
    """KDA slots and MLA pages of all layers, zeroed.

    Args:
        cfg: Model sizes.
        num_slots: N.
        num_pages: G.
        page_size: Tokens in a page.
        device: Where the tensors live.
        dtype: Dtype of latents and convolution inputs; the recurrent state is float32 at least.
        numeric: Whether open chunks are kept: their rows enter the recurrent state at edges only.
    """

    def __init__(
        self,
        cfg: TextConfig,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int = 64,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        numeric: NumericMode = NumericMode.DETERMINISTIC,
    ) -> None:
        linear = cfg.linear_attn_config
        num_kda = sum(kind is LayerKind.KDA for kind in cfg.layer_kinds)
        num_mla = cfg.num_hidden_layers - num_kda
        channels = 3 * linear.num_heads * linear.head_dim
        taps = linear.short_conv_kernel_size - 1
        wide = torch.promote_types(dtype, torch.float32)
        self.page_size = page_size
        self.numeric = numeric
        self.recurrent_ANHKV = torch.zeros(
            (num_kda, num_slots, linear.num_heads, linear.head_dim, linear.head_dim),
            device=device,
            dtype=wide,
        )
        self.open_ANRW = torch.zeros(
            (
                num_kda,
                num_slots if numeric is NumericMode.DETERMINISTIC else 0,
                OPEN_ROWS,
                channels + linear.num_heads,
            ),
            device=device,
            dtype=wide,
        )
        self.conv_ANWC = torch.zeros(
            (num_kda, num_slots, taps, channels), device=device, dtype=dtype
        )
        self.latents_MGSC = torch.zeros(
            (num_mla, num_pages, page_size, cfg.kv_lora_rank + cfg.qk_rope_head_dim),
            device=device,
            dtype=dtype,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots and pages."""
        tensors = (self.recurrent_ANHKV, self.conv_ANWC, self.open_ANRW, self.latents_MGSC)
        return sum(t.numel() * t.element_size() for t in tensors)

    def reset_slot(self, slot: int) -> None:
        """Zero a slot: the state before a sequence's first token."""
        self.recurrent_ANHKV[:, slot].zero_()
        self.conv_ANWC[:, slot].zero_()
        self.open_ANRW[:, slot : slot + 1].zero_()

    def snapshot(self, slot: int) -> SlotSnapshot:
        """Copy a slot's state."""
        return SlotSnapshot(
            recurrent_AHKV=self.recurrent_ANHKV[:, slot].clone(),
            conv_AWC=self.conv_ANWC[:, slot].clone(),
            open_A1RW=self.open_ANRW[:, slot : slot + 1].clone(),
        )

    def restore(self, slot: int, snap: SlotSnapshot) -> None:
        """Write a snapshot into a slot (any slot)."""
        self.recurrent_ANHKV[:, slot].copy_(snap.recurrent_AHKV)
        self.conv_ANWC[:, slot].copy_(snap.conv_AWC)
        self.open_ANRW[:, slot : slot + 1].copy_(snap.open_A1RW)

    def reset_pages(self, pages: Sequence[int]) -> None:
        """Zero pages, so that nothing of their last owner (a NaN, say) is left."""
        if pages:
            index = torch.tensor(list(pages), device=self.latents_MGSC.device)
            self.latents_MGSC.index_fill_(1, index, 0.0)
