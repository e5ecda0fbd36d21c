"""Fresh weights: every tensor drawn from its own generator, keyed by seed and name.

So any partition of the experts, any order of construction and any subset give the same model.
Linear weights, embeddings and the router: N(0, initializer_range). Convolutions: U(-1/2, 1/2), as a
depthwise kernel of 4 has by torch's default. Norms 1, A_log 0, dt_bias the inverse softplus of
dt ~ log-uniform(1e-3, 0.1), AttnRes pseudo-queries 0 (uniform averaging), router bias 0.
Legend: F inner width, L latent width.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from k3ray.config.model import TextConfig

DT_MIN = 1e-3
DT_MAX = 0.1
DT_FLOOR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One routed expert: w1 gate [F, L], w3 up [F, L], w2 down [L, F], float32."""

    w1_FL: torch.Tensor
    w3_FL: torch.Tensor
    w2_LF: torch.Tensor


def init_expert(cfg: TextConfig, layer: int, expert: int, seed: int) -> ExpertWeights:
    """Fresh weights of one routed expert; depends on (seed, layer, expert) only.

    Args:
        cfg: Model sizes.
        layer: 0-based MoE layer.
        expert: Logical expert id.
        seed: Seed of the model.

    Returns:
        Three float32 CPU tensors.
    """
    generator = keyed_generator(f"{seed}/expert.{layer}.{expert}")
    inner, latent = cfg.moe_intermediate_size, cfg.routed_expert_hidden_size

    def draw(rows: int, cols: int) -> torch.Tensor:
        return torch.empty(rows, cols).normal_(0.0, cfg.initializer_range, generator=generator)

    return ExpertWeights(
        w1_FL=draw(inner, latent), w3_FL=draw(inner, latent), w2_LF=draw(latent, inner)
    )


@torch.no_grad()
def init_dense(model: nn.Module, seed: int, *, std: float = 0.02) -> None:
    """Fill every parameter and buffer of the model (no routed experts) in place.

    Args:
        model: A `K3Model`, or any part of it whose names end as the release's do.
        seed: Seed of the model.
        std: Standard deviation of linear weights (`initializer_range`).
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.copy_(_fresh(name, tensor.shape, keyed_generator(f"{seed}/{name}"), std))


def _fresh(name: str, shape: torch.Size, generator: torch.Generator, std: float) -> torch.Tensor:
    leaf = name.rsplit(".", 2)[-2] if name.endswith(".weight") else name.rsplit(".", 1)[-1]
    if leaf in ("A_log", "e_score_correction_bias") or leaf.endswith("res_proj"):
        return torch.zeros(shape)
    if leaf.endswith("norm"):
        return torch.ones(shape)
    if leaf == "dt_bias":
        log_dt = torch.empty(shape).uniform_(
            math.log(DT_MIN), math.log(DT_MAX), generator=generator
        )
        dt = log_dt.exp().clamp_(min=DT_FLOOR)
        return dt + torch.log(-torch.expm1(-dt))
    if leaf.endswith("conv1d"):
        bound = shape[-1] ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def keyed_generator(key: str) -> torch.Generator:
    """A CPU generator whose numbers depend on `key` only."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
