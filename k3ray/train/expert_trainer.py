"""`ExpertTrainer`: master weights, moments, gradients and shadow of the experts one process owns.

One line trains here. A step attempt runs forward/backward by micro-batch, then norms, prepare
(new master and moments into the shadow), and after the journal's commit `apply` swaps the shadow
in. A line whose experts are BF16 or MXFP4 computes with its master rounded to that format, and a
gradient of the rounded weights counts as the master's (straight-through estimator); what is
published is the rounded weights, so that serving computes what training computed.
Messages of an older attempt are refused; a newer attempt drops everything of the older one.
A holder without a master (a rebuilt group) refuses to train until it is loaded.
Single-threaded. Legend: N latent rows, P pairs, L latent width, E experts of a layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from k3ray.config.model import TextConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.errors import K3RayError, StaleVersionError
from k3ray.model.expert_bank import situ_of, stack_of_layer
from k3ray.model.expert_math import (
    IntArray,
    SavedActivations,
    expert_backward,
    expert_forward,
    group_rows,
)
from k3ray.model.expert_stack import AnyTensor, ExpertStack, Owned, init_stacks, read_stacks
from k3ray.train.adamw import AdamState, adamw_into
from k3ray.train.step_tag import StepTag, UpdatePlan
from k3ray.weights.names import MOMENT_SUFFIXES
from k3ray.weights.release_layout import check_format

Stacks = dict[int, ExpertStack]


class Refusal(StrEnum):
    """Why a holder refuses a training message (`fields["reason"]` of its StaleVersionError)."""

    NO_MASTER = "no_master"
    OTHER_LINE = "other_line"
    OTHER_STEP = "other_step"
    OLDER_ATTEMPT = "older_attempt"
    NOT_FORWARDED = "not_forwarded"
    NOT_PREPARED = "not_prepared"


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What lives and dies with one attempt."""

    tag: StepTag
    saved: dict[tuple[int, int], SavedActivations] = field(default_factory=dict)
    digest: str | None = None


@dataclass(slots=True, kw_only=True)
class _Trained:
    """Master, moments and the weights of the forward, by layer; in FP32 those are the master."""

    master: Stacks
    m: Stacks
    v: Stacks
    weights: Stacks


@dataclass(slots=True, kw_only=True)
class _Masters:
    """What is committed, its shadow (the step being prepared), and gradients by layer."""

    committed: _Trained
    grads: Stacks
    experts: ExpertFormat
    shadow: _Trained | None = None


class ExpertTrainer:
    """Trains the experts in `owned` for one line.

    Args:
        cfg: Model sizes.
        owned: Logical expert ids by 0-based MoE layer.
        line: The line whose master lives here.
    """

    def __init__(self, cfg: TextConfig, owned: Owned, *, line: str = "main") -> None:
        self._cfg = cfg
        self._owned = {layer: tuple(sorted(held)) for layer, held in owned.items()}
        self._line = line
        self._situ = situ_of(cfg)
        self._state: _Masters | None = None
        self._attempt: _Attempt | None = None
        self._floor = 0
        self._step = 0

    @property
    def has_master(self) -> bool:
        """Whether a master is loaded."""
        return self._state is not None

    @property
    def committed_step(self) -> int:
        """The last applied step; 0 for fresh weights."""
        return self._step

    @property
    def open_attempt(self) -> StepTag | None:
        """The attempt in progress, if any."""
        return self._attempt.tag if self._attempt else None

    @property
    def size_bytes(self) -> int:
        """Bytes of master, moments, gradients, shadow and rounded weights."""
        if self._state is None:
            return 0
        one = sum(stack.size_bytes for stack in self._state.committed.master.values())
        each = 3 if self._state.experts is ExpertFormat.FP32 else 4
        return one * (each * (2 if self._state.shadow else 1) + 1)

    def init(self, seed: int, *, experts: ExpertFormat = ExpertFormat.FP32) -> None:
        """Fresh weights at step 0; forgets everything else.

        Raises:
            ConfigError: the experts' sizes do not allow the format; nothing is changed.
        """
        check_format(self._cfg, experts)
        self._reset(init_stacks(self._cfg, self._owned, seed), None, step=0, experts=experts)

    def load(
        self,
        tensors: Mapping[str, AnyTensor],
        *,
        step: int,
        experts: ExpertFormat = ExpertFormat.FP32,
    ) -> None:
        """Master and moments of a checkpoint taken after `step`; forgets everything else.

        Raises:
            PlanError: a tensor is missing or has another shape; nothing is changed.
            ConfigError: the experts' sizes do not allow the format; nothing is changed.
        """
        check_format(self._cfg, experts)
        master = read_stacks(self._cfg, self._owned, tensors)
        m, v = (
            read_stacks(self._cfg, self._owned, tensors, moment=suffix)
            for suffix in MOMENT_SUFFIXES
        )
        self._reset(master, (m, v), step=step, experts=experts)

    def forward(
        self,
        tag: StepTag,
        key: tuple[int, int],
        latents_NL: torch.Tensor,
        rows_P: IntArray,
        experts_P: IntArray,
    ) -> Generator[None, None, torch.Tensor]:
        """Rows of one layer of one micro-batch; keeps what the backward needs.

        Args:
            tag: The attempt.
            key: (micro-batch index, 0-based layer).
            latents_NL: [N, L] float32.
            rows_P, experts_P: [P] int32, pairs in ascending token order.

        Returns:
            [P, L] float32.

        Raises:
            StaleVersionError: no master, or the attempt is not the current one.
            PlanError: an expert is not held here.
        """
        attempt = self._admit(tag)
        stack = stack_of_layer(self._masters().committed.weights, key[1])
        grouping = group_rows(stack, rows_P, experts_P)
        rows_PL, saved = yield from expert_forward(stack, grouping, latents_NL, self._situ)
        if self._attempt is attempt:
            attempt.saved[key] = saved
        return rows_PL

    def evaluate(
        self,
        layer: int,
        step: int,
        latents_NL: torch.Tensor,
        rows_P: IntArray,
        experts_P: IntArray,
    ) -> Generator[None, None, torch.Tensor]:
        """Rows under the committed master of `step`, nothing kept; raises as `forward`."""
        masters = self._masters()
        if step != self._step:
            raise self._refuse(Refusal.OTHER_STEP, f"asked for step {step}")
        stack = stack_of_layer(masters.committed.weights, layer)
        grouping = group_rows(stack, rows_P, experts_P)
        rows_PL, _ = yield from expert_forward(stack, grouping, latents_NL, self._situ)
        return rows_PL

    def backward(
        self, tag: StepTag, key: tuple[int, int], grad_rows_PL: torch.Tensor
    ) -> Generator[None, None, torch.Tensor]:
        """Gradients of the pairs' latents, [P, L]; adds the weights' gradients.

        Raises:
            StaleVersionError: no forward of this attempt is kept under `key`.
        """
        attempt = self._admit(tag)
        saved = attempt.saved.pop(key, None)
        if saved is None:
            raise self._refuse(Refusal.NOT_FORWARDED, f"micro-batch, layer {key} of {tag}")
        masters = self._masters()
        result = yield from expert_backward(
            masters.committed.weights[key[1]],
            masters.grads[key[1]],
            saved,
            grad_rows_PL,
            self._situ,
        )
        return result

    def norms(self, tag: StepTag) -> Generator[None, None, dict[str, float]]:
        """Squared gradient norm of every owned matrix, by name, summed in float64."""
        self._admit(tag)
        squares = {}
        for layer, stack in self._masters().grads.items():
            for name, grad in stack.named(layer).items():
                squares[name] = float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2
            yield
        return squares

    def prepare(self, tag: StepTag, plan: UpdatePlan) -> Generator[None, None, str]:
        """Compute the update into the shadow; returns the digest of the new master."""
        attempt = self._admit(tag)
        masters = self._masters()
        if masters.shadow is None:
            master, m, v = (
                {layer: stack.map(torch.empty_like) for layer, stack in masters.grads.items()}
                for _ in range(3)
            )
            masters.shadow = _Trained(master=master, m=m, v=v, weights={})
        shadow = masters.shadow
        digest = hashlib.blake2b(digest_size=16)
        for layer in masters.grads:
            _update_layer(shadow, masters, layer, plan)
            shadow.weights[layer] = shadow.master[layer].rounded(masters.experts)
            for name, tensor in shadow.master[layer].named(layer).items():
                digest.update(name.encode())
                digest.update(tensor.numpy().data)
            yield
        attempt.digest = digest.hexdigest()
        return attempt.digest

    def apply(self, tag: StepTag) -> None:
        """Make the prepared shadow the master; applying the same step again changes nothing.

        Raises:
            StaleVersionError: nothing was prepared under this tag (this holder was rebuilt).
        """
        masters = self._masters()
        if self._attempt is None and tag.step == self._step:
            return
        attempt = self._admit(tag)
        if attempt.digest is None or masters.shadow is None:
            raise self._refuse(Refusal.NOT_PREPARED, str(tag))
        masters.committed, masters.shadow = masters.shadow, masters.committed
        self._step = tag.step
        self._drop_attempt()

    def abort(self, tag: StepTag) -> None:
        """Drop everything of `tag` and of older attempts, and refuse what is still to come of
        them; a later attempt is left alone. Fine without a master."""
        if self._attempt is not None and self._attempt.tag <= tag:
            self._drop_attempt()
        self._floor = max(self._floor, tag.attempt + 1)

    def weight_stacks(self) -> Stacks:
        """A copy of the weights that the forward uses, to be published.

        Raises:
            StaleVersionError: there is no master.
        """
        weights = self._masters().committed.weights
        return {layer: stack.map(torch.clone) for layer, stack in weights.items()}

    def checkpoint_tensors(self) -> dict[str, npt.NDArray[np.generic]]:
        """Views of the committed master and moments by store name."""
        committed = self._masters().committed
        return {
            name: array
            for suffix, stacks in zip(
                ("", *MOMENT_SUFFIXES), (committed.master, committed.m, committed.v), strict=True
            )
            for name, array in named_arrays(stacks, suffix).items()
        }

    def _reset(
        self,
        master: Stacks,
        moments: tuple[Stacks, Stacks] | None,
        *,
        step: int,
        experts: ExpertFormat,
    ) -> None:
        def zeros() -> Stacks:
            return {layer: stack.map(torch.zeros_like) for layer, stack in master.items()}

        m, v = moments if moments is not None else (zeros(), zeros())
        weights = {layer: stack.rounded(experts) for layer, stack in master.items()}
        committed = _Trained(master=master, m=m, v=v, weights=weights)
        self._state = _Masters(committed=committed, grads=zeros(), experts=experts)
        self._attempt = None
        self._step = step

    def _masters(self) -> _Masters:
        if self._state is None:
            raise self._refuse(Refusal.NO_MASTER, "a checkpoint must be loaded first")
        return self._state

    def _admit(self, tag: StepTag) -> _Attempt:
        self._masters()
        if tag.line != self._line:
            raise self._refuse(Refusal.OTHER_LINE, f"asked for line {tag.line}")
        if tag.step != self._step + 1:
            raise self._refuse(Refusal.OTHER_STEP, f"asked for step {tag.step}")
        if tag.attempt < self._floor:
            raise self._refuse(Refusal.OLDER_ATTEMPT, f"{tag} is over")
        if self._attempt is None or tag.attempt > self._attempt.tag.attempt:
            self._drop_attempt()
            self._attempt = _Attempt(tag=tag)
            self._floor = tag.attempt
        return self._attempt

    def _drop_attempt(self) -> None:
        if self._attempt is None:
            return
        self._attempt = None
        for stack in self._masters().grads.values():
            for grad in stack.tensors():
                grad.zero_()

    def _refuse(self, reason: Refusal, detail: str) -> K3RayError:
        return StaleVersionError(
            f"training refused ({reason}): {detail}; committed step of line {self._line} here is "
            f"{self._step}",
            remedy="abort the attempt; after the loss of a master load the last checkpoint",
            reason=str(reason),
            step=self._step,
        )


def named_arrays(stacks: Stacks, moment: str = "") -> dict[str, npt.NDArray[np.generic]]:
    """Views of single matrices by store name."""
    return {
        name: tensor.numpy()
        for layer, stack in stacks.items()
        for name, tensor in stack.named(layer, moment).items()
    }


def _update_layer(shadow: _Trained, masters: _Masters, layer: int, plan: UpdatePlan) -> None:
    """Master and moments after the step, into the shadow."""
    for index, grad in enumerate(masters.grads[layer].tensors()):
        new, old = (
            AdamState(
                master=each.master[layer].tensors()[index],
                m=each.m[layer].tensors()[index],
                v=each.v[layer].tensors()[index],
            )
            for each in (shadow, masters.committed)
        )
        adamw_into(new, old, grad, plan)
