"""`ExpertBank`: committed weight versions of the experts one process holds, side by side.

A version is immutable: it is loaded whole, serves by its own text, and is dropped whole. The
forward is pure, so a repeated or re-sent request gets the same bits. Single-threaded: the owner's
worker thread calls everything.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch

from k3ray.config.model import TextConfig
from k3ray.errors import PlanError, StaleVersionError
from k3ray.model.expert_math import IntArray, Situ, expert_forward, group_rows
from k3ray.model.expert_stack import AnyTensor, ExpertStack, Owned, read_stacks


class ExpertBank:
    """Versions of the experts in `owned`.

    Args:
        cfg: Model sizes.
        owned: Logical expert ids by 0-based MoE layer.
    """

    def __init__(self, cfg: TextConfig, owned: Owned) -> None:
        self._cfg = cfg
        self._owned = {layer: tuple(sorted(held)) for layer, held in owned.items()}
        self._situ = situ_of(cfg)
        self._versions: dict[str, dict[int, ExpertStack]] = {}

    @property
    def owned(self) -> dict[int, tuple[int, ...]]:
        """Logical expert ids by layer, ascending."""
        return dict(self._owned)

    @property
    def size_bytes(self) -> int:
        """Bytes of all versions."""
        return sum(s.size_bytes for stacks in self._versions.values() for s in stacks.values())

    def versions(self) -> tuple[str, ...]:
        """Loaded versions, in the order of loading."""
        return tuple(self._versions)

    def load_version(self, version: str, tensors: Mapping[str, AnyTensor]) -> None:
        """Load a version from tensors by store name; one that is loaded is left alone.

        Raises:
            PlanError: a tensor is missing or has another shape; nothing is loaded.
        """
        if version not in self._versions:
            self._versions[version] = read_stacks(self._cfg, self._owned, tensors)

    def reshaped(
        self, version: str, held: Owned, tensors: Mapping[str, AnyTensor]
    ) -> dict[int, ExpertStack]:
        """A loaded version for other experts, new ones from tensors by store name. Changes nothing,
        and reads only what never changes: any thread may build it.

        Raises:
            PlanError: a new expert's tensor is missing or has another shape.
        """
        stacks = self._versions[version]
        own = {name: t for layer, s in stacks.items() for name, t in s.named(layer).items()}
        return read_stacks(self._cfg, held, {**own, **tensors})

    def hold(self, held: Owned, versions: Mapping[str, dict[int, ExpertStack]]) -> None:
        """Serve `held` from here on: `versions` are all loaded ones, reshaped.

        Raises:
            StaleVersionError: a loaded version is missing; nothing changed.
        """
        missing = self._versions.keys() - versions.keys()
        if missing:
            raise StaleVersionError(
                f"version {min(missing)} was loaded meanwhile",
                remedy="reshape it, too",
                version=min(missing),
            )
        self._owned = {layer: tuple(sorted(experts)) for layer, experts in held.items()}
        self._versions = {version: dict(versions[version]) for version in self._versions}

    def adopt_version(self, version: str, stacks: Mapping[int, ExpertStack]) -> None:
        """Take stacks that nobody else will change as a version; a loaded one is left alone."""
        self._versions.setdefault(version, dict(stacks))

    def drop_version(self, version: str) -> None:
        """Free a version; unknown ones are fine."""
        self._versions.pop(version, None)

    def forward(
        self,
        layer: int,
        version: str,
        latents_NL: torch.Tensor,
        rows_P: IntArray,
        experts_P: IntArray,
    ) -> Generator[None, None, torch.Tensor]:
        """One unweighted row per (latent row, expert) pair.

        Args:
            layer: 0-based MoE layer.
            version: Version text.
            latents_NL: [N, L] float32.
            rows_P: [P] int32 index into the latents, ascending.
            experts_P: [P] int32 logical expert ids.

        Returns:
            [P, L] float32.

        Raises:
            StaleVersionError: the version is not loaded.
            PlanError: the layer or an expert is not held here.
        """
        stack = self._stack(layer, version)
        grouping = group_rows(stack, rows_P, experts_P)
        rows_PL, _ = yield from expert_forward(stack, grouping, latents_NL, self._situ)
        return rows_PL

    def _stack(self, layer: int, version: str) -> ExpertStack:
        stacks = self._versions.get(version)
        if stacks is None:
            raise StaleVersionError(
                f"weight version {version} is not loaded here (loaded: {list(self._versions)})",
                remedy="pin a version that `k3ray status` lists",
                version=version,
            )
        return stack_of_layer(stacks, layer)


def stack_of_layer(stacks: Mapping[int, ExpertStack], layer: int) -> ExpertStack:
    """The stack of a layer, or `PlanError` when nothing of it is held."""
    stack = stacks.get(layer)
    if stack is None:
        raise PlanError(
            f"no expert of layer {layer} is held here (layers: {sorted(stacks)})",
            remedy="read the current placement plan and send to the expert's home",
            layer=layer,
        )
    return stack


def situ_of(cfg: TextConfig) -> Situ:
    """Activation bounds of a model."""
    return Situ(beta=cfg.activation_situ_beta, linear_beta=cfg.activation_situ_linear_beta)
