"""`ExpertSide`: what a training step asks of the routed experts, wherever they live.

Two implementations: `LocalExperts` (this process; single-process training and the reference of
parity tests) and `RemoteExperts` (expert groups over the transport).
Legend: T tokens, K experts per token, L latent width.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from k3ray.config.model import TextConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.model.dispatch import pairs_of
from k3ray.model.executor import ExpertExecutor, TrainableExpertExecutor
from k3ray.model.expert_math import finish
from k3ray.model.expert_stack import all_experts, owned_names
from k3ray.train.expert_trainer import ExpertTrainer, named_arrays
from k3ray.train.step_tag import StepTag, UpdatePlan
from k3ray.weights.manifest import EntryKind, ShardInfo
from k3ray.weights.names import MOMENT_SUFFIXES
from k3ray.weights.store import StagedEntry, WeightStore


class ExpertSide(Protocol):
    """Experts of one line. Methods taking a tag raise `StepAbortedError` when a holder was lost,
    refused the attempt or did not answer in time."""

    @property
    def plan_version(self) -> int:
        """Placement plan in use; 0 in one process."""
        ...

    def begin(self, tag: StepTag) -> None:
        """Open an attempt; it sticks to the placement of this moment."""
        ...

    def executor(self, tag: StepTag, micro_batch: int) -> TrainableExpertExecutor:
        """Forward and backward of one micro-batch."""
        ...

    def eval_executor(self, step: int) -> ExpertExecutor:
        """Forward under the committed master of `step`."""
        ...

    def squares(self, tag: StepTag) -> dict[str, float]:
        """Squared gradient norm of every expert matrix, by name."""
        ...

    def prepare(self, tag: StepTag, plan: UpdatePlan) -> dict[str, str]:
        """Stage the update everywhere; digest by holder."""
        ...

    def apply(self, tag: StepTag) -> None:
        """Make the staged update the master everywhere; idempotent."""
        ...

    def abort(self, tag: StepTag) -> None:
        """Drop the attempt wherever it can be reached; never raises for lost holders."""
        ...

    def settle(self, step: int) -> bool:
        """Wait until every holder is alive; whether all of them have the master of `step`."""
        ...

    def load(self, entry: str | None, *, step: int, seed: int) -> None:
        """Load a checkpoint everywhere, or (None) fresh weights by seed."""
        ...

    def save(self, staged: StagedEntry) -> list[ShardInfo]:
        """Write master and moments into a staged checkpoint."""
        ...

    def publish(self, staged: StagedEntry) -> list[ShardInfo]:
        """Write the forward's weights into a staged version; holders keep a copy to serve from."""
        ...


def sum_pairs(rows_TKL: torch.Tensor, expert_ids_TK: torch.Tensor) -> torch.Tensor:
    """Sum over K in ascending expert id, so that the bits depend on nothing else; [T, L]."""
    order_TK = expert_ids_TK.argsort(dim=1)
    sorted_TKL = rows_TKL.gather(1, order_TK[:, :, None].expand_as(rows_TKL))
    total_TL = sorted_TKL[:, 0].clone()
    for k in range(1, sorted_TKL.shape[1]):
        total_TL += sorted_TKL[:, k]
    return total_TL


class LocalExperts:
    """All experts in this process.

    Args:
        cfg: Model sizes.
        store: Where checkpoints are read and written.
        line: The line.
        experts: Numbers that the forward computes with; the master is float32.
    """

    def __init__(
        self,
        cfg: TextConfig,
        *,
        store: WeightStore,
        line: str,
        experts: ExpertFormat = ExpertFormat.FP32,
    ) -> None:
        self._trainer = ExpertTrainer(cfg, all_experts(cfg), line=line)
        self._names = owned_names(all_experts(cfg))
        self._store = store
        self._line = line
        self._experts = experts
        self.plan_version = 0

    def begin(self, tag: StepTag) -> None:
        """See `ExpertSide`."""

    def executor(self, tag: StepTag, micro_batch: int) -> TrainableExpertExecutor:
        """See `ExpertSide`."""
        return _LocalTraining(self._trainer, tag, micro_batch)

    def eval_executor(self, step: int) -> ExpertExecutor:
        """See `ExpertSide`."""
        return _LocalEvaluation(self._trainer, step)

    def squares(self, tag: StepTag) -> dict[str, float]:
        """See `ExpertSide`."""
        return finish(self._trainer.norms(tag))

    def prepare(self, tag: StepTag, plan: UpdatePlan) -> dict[str, str]:
        """See `ExpertSide`."""
        return {"experts": finish(self._trainer.prepare(tag, plan))}

    def apply(self, tag: StepTag) -> None:
        """See `ExpertSide`."""
        self._trainer.apply(tag)

    def abort(self, tag: StepTag) -> None:
        """See `ExpertSide`."""
        self._trainer.abort(tag)

    def settle(self, step: int) -> bool:
        """See `ExpertSide`."""
        return self._trainer.has_master and self._trainer.committed_step == step

    def load(self, entry: str | None, *, step: int, seed: int) -> None:
        """See `ExpertSide`."""
        if entry is None:
            self._trainer.init(seed, experts=self._experts)
            return
        names = [name + suffix for suffix in ("", *MOMENT_SUFFIXES) for name in self._names]
        opened = self._store.open(self._line, entry, EntryKind.CHECKPOINT)
        self._trainer.load(opened.read(names), step=step, experts=self._experts)

    def save(self, staged: StagedEntry) -> list[ShardInfo]:
        """See `ExpertSide`."""
        tensors = self._trainer.checkpoint_tensors()
        return [self._store.write_shard(staged, "experts", tensors)]

    def publish(self, staged: StagedEntry) -> list[ShardInfo]:
        """See `ExpertSide`."""
        tensors = named_arrays(self._trainer.weight_stacks())
        return [self._store.write_shard(staged, "experts", tensors)]


class _LocalTraining:
    """`TrainableExpertExecutor` of one micro-batch over a local trainer."""

    def __init__(self, trainer: ExpertTrainer, tag: StepTag, micro_batch: int) -> None:
        self._trainer = trainer
        self._tag = tag
        self._micro_batch = micro_batch
        self._ids: dict[int, torch.Tensor] = {}

    def forward(
        self, layer: int, latents_TL: torch.Tensor, expert_ids_TK: torch.Tensor
    ) -> torch.Tensor:
        rows_P, experts_P = pairs_of(expert_ids_TK.numpy())
        rows_PL = finish(
            self._trainer.forward(
                self._tag,
                (self._micro_batch, layer),
                latents_TL.detach(),
                rows_P.astype(np.int32),
                experts_P.astype(np.int32),
            )
        )
        self._ids[layer] = expert_ids_TK
        return rows_PL.view(*expert_ids_TK.shape, -1)

    def backward(self, layer: int, grad_rows_TKL: torch.Tensor) -> torch.Tensor:
        grad_PL = grad_rows_TKL.reshape(-1, grad_rows_TKL.shape[-1])
        dx_PL = finish(self._trainer.backward(self._tag, (self._micro_batch, layer), grad_PL))
        return sum_pairs(dx_PL.view_as(grad_rows_TKL), self._ids.pop(layer))


class _LocalEvaluation:
    """`ExpertExecutor` under the committed master."""

    def __init__(self, trainer: ExpertTrainer, step: int) -> None:
        self._trainer = trainer
        self._step = step

    def forward(
        self, layer: int, latents_TL: torch.Tensor, expert_ids_TK: torch.Tensor
    ) -> torch.Tensor:
        rows_P, experts_P = pairs_of(expert_ids_TK.numpy())
        rows_PL = finish(
            self._trainer.evaluate(
                layer,
                self._step,
                latents_TL.detach(),
                rows_P.astype(np.int32),
                experts_P.astype(np.int32),
            )
        )
        return rows_PL.view(*expert_ids_TK.shape, -1)
