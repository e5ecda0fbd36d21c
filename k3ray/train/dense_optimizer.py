"""`DenseOptimizer`: AdamW of everything outside the routed experts, staged in a shadow.

`prepare` computes new parameters and moments beside the old ones; only `apply`, after the
journal's commit, puts them in place. The model's parameters are never half updated. Weight decay
applies to matrices only (not to norms, biases, decay rates and convolutions).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from k3ray.errors import StaleVersionError, StoreError
from k3ray.train.adamw import AdamState, adamw_into
from k3ray.train.step_tag import UpdatePlan
from k3ray.weights.names import MOMENT_SUFFIXES

Tensors = Mapping[str, npt.NDArray[np.generic]]


class DenseOptimizer:
    """Owns the moments of a model's parameters.

    Args:
        model: The dense stack; parameters that require no gradient are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._committed = {
            name: AdamState(master=p.data, m=torch.zeros_like(p.data), v=torch.zeros_like(p.data))
            for name, p in sorted(model.named_parameters())
            if p.requires_grad
        }
        self._shadow = {
            name: AdamState(
                master=torch.empty_like(s.master),
                m=torch.empty_like(s.master),
                v=torch.empty_like(s.master),
            )
            for name, s in self._committed.items()
        }
        self._prepared = False

    def zero_grad(self) -> None:
        """Drop all gradients and whatever was prepared."""
        self._model.zero_grad(set_to_none=True)
        self._prepared = False

    def squares(self) -> dict[str, float]:
        """Squared norm of every parameter's gradient, by name, summed in float64."""
        return {
            name: float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2
            for name, grad in self._grads().items()
        }

    def prepare(self, plan: UpdatePlan) -> str:
        """Compute the update into the shadow; returns the digest of the new parameters."""
        grads = self._grads()
        digest = hashlib.blake2b(digest_size=16)
        for name, old in self._committed.items():
            new = self._shadow[name]
            adamw_into(new, old, grads[name], plan, decay=old.master.ndim == 2)
            digest.update(name.encode())
            digest.update(new.master.contiguous().cpu().numpy().data)
        self._prepared = True
        return digest.hexdigest()

    def apply(self) -> None:
        """Put the shadow in place and drop the gradients.

        Raises:
            StaleVersionError: nothing is prepared.
        """
        if not self._prepared:
            raise StaleVersionError(
                "no dense update is prepared", remedy="prepare comes before commit and apply"
            )
        for name, old in self._committed.items():
            new = self._shadow[name]
            old.master.copy_(new.master)  # in place: the model holds these very tensors
            self._shadow[name] = AdamState(master=new.master, m=old.m, v=old.v)
            self._committed[name] = AdamState(master=old.master, m=new.m, v=new.v)
        self.zero_grad()

    def named_tensors(self, *, moments: bool) -> dict[str, npt.NDArray[np.generic]]:
        """The model's whole state (buffers too), and the moments, by store name."""
        tensors = {
            name: tensor.detach().cpu().numpy() for name, tensor in self._model.state_dict().items()
        }
        if moments:
            for name, state in self._committed.items():
                for suffix, moment in zip(MOMENT_SUFFIXES, (state.m, state.v), strict=True):
                    tensors[name + suffix] = moment.cpu().numpy()
        return tensors

    def names(self, *, moments: bool) -> list[str]:
        """Store names of `named_tensors`."""
        names = list(self._model.state_dict())
        if moments:
            names += [name + suffix for name in self._committed for suffix in MOMENT_SUFFIXES]
        return names

    def reset_moments(self) -> None:
        """Forget the moments: a fresh start."""
        for state in self._committed.values():
            state.m.zero_()
            state.v.zero_()
        self.zero_grad()

    def load(self, tensors: Tensors) -> None:
        """Parameters, buffers and moments of a checkpoint.

        Raises:
            StoreError: a tensor has another shape than the model's.
        """
        targets = dict(self._model.state_dict())
        for name, state in self._committed.items():
            for suffix, moment in zip(MOMENT_SUFFIXES, (state.m, state.v), strict=True):
                targets[name + suffix] = moment
        for name, target in targets.items():
            source = torch.from_numpy(tensors[name])
            if source.shape != target.shape:
                raise StoreError(
                    f"tensor {name} has shape {tuple(source.shape)}, the model's has "
                    f"{tuple(target.shape)}",
                    remedy="the checkpoint was written by another model config",
                    tensor=name,
                )
            target.copy_(source)
        self.zero_grad()

    def _grads(self) -> dict[str, torch.Tensor]:
        parameters = dict(self._model.named_parameters())
        grads = {}
        for name, state in self._committed.items():
            grad = parameters[name].grad
            grads[name] = torch.zeros_like(state.master) if grad is None else grad
        return grads
