"""`ExpertStack`: the three matrices of several experts of one layer, stacked.

The same shape holds weights, gradients and optimizer moments. Names are the store's names; an
expert's slot in the stack is its rank among the ascending logical ids.
Legend: E experts held, F inner width, L latent width, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from k3ray.config.model import TextConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.errors import PlanError
from k3ray.model.init import init_expert
from k3ray.ops.mxfp import mxfp4_round
from k3ray.weights.names import expert_tensor_name, expert_tensor_names

Owned = Mapping[int, tuple[int, ...]]
"""Logical expert ids held, by 0-based layer."""

AnyTensor = torch.Tensor | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack:
    """Experts of one layer.

    Args:
        experts: Logical ids, ascending.
        slot_of: [number of logical experts] int64, slot of each logical id, -1 if not held.
        w1_EFL, w3_EFL: [E, F, L] gate and up projections.
        w2_ELF: [E, L, F] down projection.
    """

    experts: tuple[int, ...]
    slot_of: npt.NDArray[np.int64]
    w1_EFL: torch.Tensor
    w3_EFL: torch.Tensor
    w2_ELF: torch.Tensor

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.experts)

    @property
    def size_bytes(self) -> int:
        """Bytes of the three tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The stacked matrices in the order of their names: w1, w2, w3."""
        return self.w1_EFL, self.w2_ELF, self.w3_EFL

    def slots_of(self, experts_P: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Slots of logical experts.

        Raises:
            PlanError: an expert is not held here; names it.
        """
        in_range = (experts_P >= 0) & (experts_P < len(self.slot_of))
        slots_P = np.where(in_range, self.slot_of[np.where(in_range, experts_P, 0)], -1)
        if len(slots_P) and slots_P.min() < 0:
            missing = sorted({int(e) for e in experts_P[slots_P < 0]})
            raise PlanError(
                f"experts {missing} are not held here (held: {list(self.experts)})",
                remedy="read the current placement plan and send to the expert's home",
                experts=tuple(missing),
            )
        return slots_P

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ExpertStack:
        """A stack whose tensors are `change` of these."""
        return ExpertStack(
            experts=self.experts,
            slot_of=self.slot_of,
            w1_EFL=change(self.w1_EFL),
            w3_EFL=change(self.w3_EFL),
            w2_ELF=change(self.w2_ELF),
        )

    def rounded(self, kind: ExpertFormat) -> ExpertStack:
        """What a checkpoint in that format would give back; for FP32 these very tensors.

        Raises:
            ValueError: a weight is not finite.
        """
        match kind:
            case ExpertFormat.FP32:
                return self
            case ExpertFormat.BF16:
                return self.map(lambda w: w.bfloat16().float())
            case ExpertFormat.MXFP4:
                # one expert at a time: the codes take many times the weights' memory
                return self.map(lambda w: torch.stack([mxfp4_round(each) for each in w]))

    def named(self, layer: int, moment: str = "") -> dict[str, torch.Tensor]:
        """Views of single matrices by store name."""
        return {
            expert_tensor_name(layer, expert, matrix, moment): stacked[slot]
            for slot, expert in enumerate(self.experts)
            for matrix, stacked in zip(("w1", "w2", "w3"), self.tensors(), strict=True)
        }


def stack_from_tensors(
    cfg: TextConfig,
    layer: int,
    experts: tuple[int, ...],
    tensors: Mapping[str, AnyTensor],
    *,
    moment: str = "",
) -> ExpertStack:
    """Stack matrices read from the store.

    Raises:
        PlanError: a tensor is missing or has another shape than the config says.
    """
    inner, latent = cfg.moe_intermediate_size, cfg.routed_expert_hidden_size
    shapes = {"w1": (inner, latent), "w2": (latent, inner), "w3": (inner, latent)}
    stacked = {}
    for matrix, shape in shapes.items():
        parts = []
        for expert in experts:
            name = expert_tensor_name(layer, expert, matrix, moment)
            part = tensors.get(name)
            if part is None or tuple(part.shape) != shape:
                found = "missing" if part is None else f"of shape {tuple(part.shape)}"
                raise PlanError(
                    f"tensor {name} is {found}, expected {shape}",
                    remedy="the entry was written by another model config",
                    tensor=name,
                )
            parts.append(torch.as_tensor(part, dtype=torch.float32))
        stacked[matrix] = torch.stack(parts)
    return ExpertStack(
        experts=experts,
        slot_of=_slot_of(cfg, experts),
        w1_EFL=stacked["w1"],
        w3_EFL=stacked["w3"],
        w2_ELF=stacked["w2"],
    )


def init_stacks(cfg: TextConfig, owned: Owned, seed: int) -> dict[int, ExpertStack]:
    """Fresh weights by layer; depend on (seed, layer, expert) only, not on the partition."""
    stacks = {}
    for layer, held in owned.items():
        experts = tuple(sorted(held))
        weights = [init_expert(cfg, layer, expert, seed) for expert in experts]
        stacks[layer] = ExpertStack(
            experts=experts,
            slot_of=_slot_of(cfg, experts),
            w1_EFL=torch.stack([w.w1_FL for w in weights]),
            w3_EFL=torch.stack([w.w3_FL for w in weights]),
            w2_ELF=torch.stack([w.w2_LF for w in weights]),
        )
    return stacks


def read_stacks(
    cfg: TextConfig, owned: Owned, tensors: Mapping[str, AnyTensor], *, moment: str = ""
) -> dict[int, ExpertStack]:
    """`stack_from_tensors` for every layer held."""
    return {
        layer: stack_from_tensors(cfg, layer, tuple(sorted(held)), tensors, moment=moment)
        for layer, held in owned.items()
    }


def owned_names(owned: Owned, moment: str = "") -> list[str]:
    """Store names of everything held."""
    return [
        name
        for layer, held in owned.items()
        for expert in sorted(held)
        for name in expert_tensor_names(layer, expert, moment)
    ]


def all_experts(cfg: TextConfig) -> dict[int, tuple[int, ...]]:
    """Every expert of every MoE layer: what a single process owns."""
    return {layer: tuple(range(cfg.num_experts)) for layer in cfg.moe_layers}


def _slot_of(cfg: TextConfig, experts: tuple[int, ...]) -> npt.NDArray[np.int64]:
    slots = np.full(cfg.num_experts, -1, dtype=np.int64)
    slots[list(experts)] = np.arange(len(experts))
    return slots
