"""What the speed benchmark times: our model as trained and served, and transformers' cousin of it.

transformers' `KimiLinearForCausalLM` is Kimi-Linear-48B's architecture, not K3's (no AttnRes, no
latent experts, SiLU for SiTU); at `k3-bench28`'s sizes it is the nearest model that others run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from k3ray.config.count import count_parameters
from k3ray.config.jobs import OptimizerConfig
from k3ray.config.model import LayerKind
from k3ray.config.numeric import NumericMode
from k3ray.config.presets import PRESETS
from k3ray.model.init import init_dense
from k3ray.model.k3 import K3Model
from k3ray.model.local_executor import LocalExecutor
from k3ray.model.serve_state import SeqSpan, ServeState
from k3ray.train.data_order import DataOrder
from k3ray.train.dense_optimizer import DenseOptimizer
from k3ray.train.expert_side import LocalExperts
from k3ray.train.step import StepParts, run_attempt
from k3ray.train.step_tag import StepTag
from k3ray.weights.store import WeightStore
from tests.support.local_stack import local_bank
from tests.support.toy_text import ToyText

CHUNK_TOKENS = 512


class Training:
    """Steps of a preset, experts in this process.

    Args:
        sequences, length: Of one step.
    """

    def __init__(
        self, preset: str, *, sequences: int, length: int, numeric: NumericMode, root: Path
    ) -> None:
        cfg = PRESETS[preset].text_config
        model = K3Model(cfg, numeric=numeric)
        init_dense(model, 0)
        experts = LocalExperts(cfg, store=WeightStore(root / f"{preset}-{numeric}"), line="main")
        experts.load(None, step=0, seed=0)
        self.tokens = sequences * length
        self.flops = 6 * count_parameters(cfg).active * self.tokens
        vocab = cfg.special_token_base
        self._parts = StepParts(
            model=model, dense=DenseOptimizer(model), experts=experts,
            data=DataOrder(
                source=ToyText(num_sequences=64, sequence_length=length, vocab=vocab),
                seed=0, micro_batches=1, sequences=sequences,
            ),
            optimizer=OptimizerConfig(), total_steps=1000,
        )  # fmt: skip
        self._step = 0

    def __call__(self) -> None:
        """One step: forward, backward, optimizer."""
        self._step += 1
        run_attempt(
            self._parts, StepTag(line="main", step=self._step, attempt=self._step),
            num_updates=self._step - 1, commit=lambda record: None,
        )  # fmt: skip


class Serving:
    """Prefill and decode of a preset by the serving path, experts in this process."""

    def __init__(self, preset: str, *, numeric: NumericMode, max_batch: int, context: int) -> None:
        cfg = PRESETS[preset].text_config
        self._model = K3Model(cfg, numeric=numeric)
        init_dense(self._model, 0)
        self._model.requires_grad_(requires_grad=False)
        self._executor = LocalExecutor(local_bank(cfg, {"v": 0}), version="v")
        pages = -(-context // 64)
        self._state = ServeState(
            cfg, num_slots=max_batch, num_pages=max_batch * pages, numeric=numeric
        )
        self._pages = [tuple(range(i * pages, (i + 1) * pages)) for i in range(max_batch)]
        self._tokens = torch.randint(0, cfg.vocab_size, (context,))

    def prefill(self, length: int, *, batch: int = 1) -> None:
        """The first `length` tokens of `batch` sequences, from nothing."""
        for slot in range(batch):
            self._state.reset_slot(slot)
            for start in range(0, length, CHUNK_TOKENS):
                self._serve([(slot, start)], min(CHUNK_TOKENS, length - start))

    def decode(self, start: int, steps: int, *, batch: int) -> None:
        """`steps` tokens for each of `batch` sequences that hold `start` tokens."""
        for position in range(start, start + steps):
            self._serve([(slot, position) for slot in range(batch)], 1)

    def _serve(self, sequences: list[tuple[int, int]], length: int) -> None:
        spans = [
            SeqSpan(slot=slot, pages=self._pages[slot], start=start, length=length)
            for slot, start in sequences
        ]
        tokens = torch.cat([self._tokens[start : start + length] for _, start in sequences])
        with torch.inference_mode():  # as the engine's runner does
            self._model.forward_serve(tokens, spans, self._state, self._executor)


class KimiLinear:
    """transformers' model at a preset's sizes."""

    def __init__(self, preset: str) -> None:
        sys.modules["fla"] = None  # type: ignore[assignment]  # it runs on CPUs only without fla
        from transformers import KimiLinearConfig, KimiLinearForCausalLM

        cfg = PRESETS[preset].text_config
        linear = cfg.linear_attn_config
        kinds = {LayerKind.KDA: "linear_attention", LayerKind.MLA: "full_attention"}
        config = KimiLinearConfig(
            vocab_size=cfg.vocab_size, hidden_size=cfg.hidden_size,
            intermediate_size=cfg.intermediate_size,
            moe_intermediate_size=cfg.moe_intermediate_size,
            num_hidden_layers=cfg.num_hidden_layers, num_attention_heads=cfg.num_attention_heads,
            num_key_value_heads=cfg.num_key_value_heads, n_shared_experts=cfg.num_shared_experts,
            kv_lora_rank=cfg.kv_lora_rank, q_lora_rank=None,
            qk_rope_head_dim=cfg.qk_rope_head_dim, v_head_dim=cfg.v_head_dim,
            qk_nope_head_dim=cfg.qk_nope_head_dim, num_experts_per_tok=cfg.num_experts_per_token,
            num_local_experts=cfg.num_experts, linear_head_dim=linear.head_dim,
            linear_num_heads=linear.num_heads, pad_token_id=None, bos_token_id=1, eos_token_id=2,
            layer_types=[kinds[kind] for kind in cfg.layer_kinds],
        )  # fmt: skip
        torch.manual_seed(0)
        self._model: Any = KimiLinearForCausalLM(config)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._vocab = cfg.special_token_base
        self._cache: Any = None

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        return sum(p.numel() for p in self._model.parameters())

    def train(self, *, sequences: int, length: int) -> None:
        """One step."""
        ids = torch.randint(0, self._vocab, (sequences, length))
        self._model.train()
        self._model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def prefill(self, length: int, *, batch: int = 1) -> None:
        """The first `length` tokens of `batch` sequences, together."""
        self._model.eval()
        ids = torch.randint(0, self._vocab, (batch, length))
        self._cache = self._model(input_ids=ids, use_cache=True).past_key_values

    @torch.no_grad()
    def decode(self, steps: int, *, batch: int) -> None:
        """`steps` tokens after a prefill of the same batch."""
        for _ in range(steps):
            ids = torch.randint(0, self._vocab, (batch, 1))
            out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
            self._cache = out.past_key_values


Work = Callable[[], None]
