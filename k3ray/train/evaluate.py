"""Held-out evaluation: mean loss in nats per token, and bits per byte of text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from k3ray.model.executor import ExpertExecutor
from k3ray.model.k3 import K3Model
from k3ray.train.data_order import SequenceSource, pack
from k3ray.train.loss import head_loss_sum, num_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Over `num_tokens` predicted tokens; `bits_per_byte` = bits per token / bytes per token."""

    num_tokens: int
    nats_per_token: float
    bits_per_byte: float


@torch.no_grad()
def evaluate(
    model: K3Model,
    experts: ExpertExecutor,
    source: SequenceSource,
    *,
    bytes_per_token: float,
    max_sequences: int,
    sequences_per_batch: int,
) -> EvalResult | None:
    """Evaluate the first `max_sequences` sequences; None when there are none."""
    count = min(max_sequences, source.num_sequences)
    nats, num_tokens = 0.0, 0
    for start in range(0, count, sequences_per_batch):
        batch = pack(source, tuple(range(start, min(count, start + sequences_per_batch))))
        assert batch.targets_T is not None
        hidden_TX = model.forward_hidden(batch, experts)
        nats += float(head_loss_sum(hidden_TX, model.lm_head.weight, batch.targets_T))
        num_tokens += num_targets(batch.targets_T)
    if num_tokens == 0:
        return None
    mean = nats / num_tokens
    return EvalResult(
        num_tokens=num_tokens,
        nats_per_token=mean,
        bits_per_byte=mean / math.log(2) / bytes_per_token,
    )
