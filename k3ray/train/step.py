"""One optimizer step attempt: micro-batches, norms, prepare, commit, apply.

The loss is the mean over the tokens of the whole step. Until the commit nothing of an attempt is
visible; after it `apply` is idempotent. A step whose gradients are not finite commits as a no-op
(`skipped`). Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from k3ray.config.jobs import OptimizerConfig
from k3ray.model.batch import PackedBatch
from k3ray.model.k3 import K3Model
from k3ray.train.authority import StepRecord
from k3ray.train.data_order import DataOrder
from k3ray.train.dense_optimizer import DenseOptimizer
from k3ray.train.expert_side import ExpertSide
from k3ray.train.loss import head_loss_sum, num_targets
from k3ray.train.schedule import learning_rate
from k3ray.train.step_tag import StepTag, UpdatePlan

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step works on."""

    model: K3Model
    dense: DenseOptimizer
    experts: ExpertSide
    data: DataOrder
    optimizer: OptimizerConfig
    total_steps: int


def run_attempt(
    parts: StepParts, tag: StepTag, *, num_updates: int, commit: Callable[[StepRecord], None]
) -> StepRecord:
    """Run one attempt to its end.

    Args:
        parts: Model, optimizer state, data.
        tag: The attempt.
        num_updates: Optimizer updates before this step.
        commit: Journals the record; the step has happened once it returns.

    Raises:
        StepAbortedError: a holder was lost or refused, before or after the commit; the caller
            finds out from the holders which step they hold.
    """
    parts.dense.zero_grad()
    parts.experts.begin(tag)
    batches = [parts.data.micro_batch(tag.step, i) for i in range(parts.data.micro_batches)]
    num_tokens = sum(num_targets(_targets(batch)) for batch in batches)
    nats = sum(
        _backward(parts, batch, tag, index=index, scale=1.0 / max(1, num_tokens))
        for index, batch in enumerate(batches)
    )
    norm = global_norm({**parts.dense.squares(), **parts.experts.squares(tag)})
    plan = _update_plan(parts, tag.step, norm, num_updates)
    digests = parts.experts.prepare(tag, plan) | {"dense": parts.dense.prepare(plan)}
    start, stop = parts.data.cursor(tag.step)
    record = StepRecord(
        line=tag.line, step=tag.step, attempt=tag.attempt, plan=parts.experts.plan_version,
        cursor_start=start, cursor_stop=stop, sample_digest=parts.data.digest(tag.step),
        num_tokens=num_tokens, loss=_finite(nats / max(1, num_tokens)), grad_norm=_finite(norm),
        lr=plan.lr, skipped=plan.skip, num_updates=num_updates + (not plan.skip),
        holder_digests=digests,
    )  # fmt: skip
    commit(record)
    parts.dense.apply()
    parts.experts.apply(tag)
    return record


def global_norm(squares: Mapping[str, float]) -> float:
    """Norm over all tensors, added in name order so that no partition changes a bit."""
    return math.sqrt(math.fsum(squares[name] for name in sorted(squares)))


def _backward(
    parts: StepParts, batch: PackedBatch, tag: StepTag, *, index: int, scale: float
) -> float:
    """Forward and backward of one micro-batch; returns its loss in nats, summed over tokens."""
    executor = parts.experts.executor(tag, index)
    hidden_TH = parts.model.forward_hidden(batch, executor)
    nats = head_loss_sum(hidden_TH, parts.model.lm_head.weight, _targets(batch))
    (nats * scale).backward()  # type: ignore[no-untyped-call]
    return float(nats.detach())


def _update_plan(parts: StepParts, step: int, norm: float, num_updates: int) -> UpdatePlan:
    config = parts.optimizer
    finite = math.isfinite(norm)
    return UpdatePlan(
        lr=learning_rate(step, parts.total_steps, config),
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        grad_scale=min(1.0, config.clip_norm / (norm + _NORM_EPS)) if finite else 0.0,
        skip=not finite,
        num_updates=num_updates,
    )


def _targets(batch: PackedBatch) -> torch.Tensor:
    assert batch.targets_T is not None
    return batch.targets_T


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
