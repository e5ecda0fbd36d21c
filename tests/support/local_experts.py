"""A small trainable expert executor in plain autograd, any float dtype; for tests of the model.

It knows nothing of the banks and trainers of `k3ray`, so that the model is tested on its own.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from k3ray.config.model import TextConfig
from k3ray.model.init import init_expert
from k3ray.weights.names import expert_tensor_name


class PlainExperts:
    """Every expert of the model, weights by store name, gradients in their `.grad`."""

    def __init__(self, cfg: TextConfig, seed: int, *, dtype: torch.dtype = torch.float32) -> None:
        self._cfg = cfg
        self.weights: dict[str, torch.Tensor] = {}
        for layer in cfg.moe_layers:
            for expert in range(cfg.num_experts):
                fresh = init_expert(cfg, layer, expert, seed)
                for matrix, tensor in (
                    ("w1", fresh.w1_FL),
                    ("w2", fresh.w2_LF),
                    ("w3", fresh.w3_FL),
                ):
                    name = expert_tensor_name(layer, expert, matrix)
                    self.weights[name] = tensor.to(dtype).requires_grad_()
        self.num_forwards = 0
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(
        self, layer: int, latents_TL: torch.Tensor, expert_ids_TK: torch.Tensor
    ) -> torch.Tensor:
        """See `ExpertExecutor.forward`."""
        self.num_forwards += 1
        with torch.inference_mode(mode=False), torch.enable_grad():
            latents_TL = latents_TL.detach().clone().requires_grad_()
            rows_TKL = torch.zeros(*expert_ids_TK.shape, latents_TL.shape[1]).to(latents_TL)
            for expert in sorted(set(expert_ids_TK.flatten().tolist())):
                token, place = (expert_ids_TK == expert).nonzero(as_tuple=True)
                rows_TKL = rows_TKL.index_put(
                    (token, place), self._expert(layer, expert, latents_TL[token])
                )
        self._saved[layer] = (latents_TL, rows_TKL)
        return rows_TKL.detach()

    def backward(self, layer: int, grad_rows_TKL: torch.Tensor) -> torch.Tensor:
        """See `TrainableExpertExecutor.backward`."""
        latents_TL, rows_TKL = self._saved.pop(layer)
        torch.autograd.backward(rows_TKL, grad_rows_TKL)
        assert latents_TL.grad is not None
        return latents_TL.grad

    def _expert(self, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        cfg = self._cfg
        w1, w2, w3 = (
            self.weights[expert_tensor_name(layer, expert, name)] for name in ("w1", "w2", "w3")
        )
        gate, up = functional.linear(x, w1), functional.linear(x, w3)
        beta, linear_beta = cfg.activation_situ_beta, cfg.activation_situ_linear_beta
        if linear_beta is not None:
            up = linear_beta * torch.tanh(up / linear_beta)
        hidden = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up
        return functional.linear(hidden, w2)
