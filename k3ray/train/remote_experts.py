"""`RemoteExperts`: the routed experts on expert groups, trained where they live.

An attempt sticks to one placement plan. Any loss, refusal, missed deadline or newer plan aborts
the whole attempt (`StepAbortedError`); nothing is repaired inside an attempt. Results do not
depend on the partition: an expert's rows lie in one group in ascending token order.
Legend: T tokens, K experts per token, L latent width, P pairs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from k3ray.clock import Deadline
from k3ray.config.numeric import ExpertFormat
from k3ray.errors import (
    CapacityError,
    DeadlineError,
    K3RayError,
    PeerLostError,
    PlanError,
    StaleVersionError,
    StepAbortedError,
)
from k3ray.model.dispatch import Part, pairs_of, split_pairs, take_rows
from k3ray.model.executor import ExpertExecutor, TrainableExpertExecutor
from k3ray.model.expert_stack import owned_names
from k3ray.model.group_links import GroupLinks, PlanSource
from k3ray.placement.plan import GroupPeer, PlacementPlan
from k3ray.train.expert_side import sum_pairs
from k3ray.train.step_tag import StepTag, UpdatePlan
from k3ray.transport.protocol import Array, Lane, Message, Pending
from k3ray.weights.manifest import ShardInfo, TensorInfo
from k3ray.weights.store import StagedEntry

Meta = Mapping[str, str | int | float | bool | None]

_CREDIT_PAUSE_S = 0.001
_SETTLE_SLICE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLimits:
    """Deadlines in seconds: one layer's hop or control call, file work, a group's rebuild."""

    call_s: float = 30.0
    files_s: float = 300.0
    rebuild_s: float = 120.0


class RemoteExperts:
    """An `ExpertSide` over the transport; used by one thread.

    Args:
        links: Connections of this thread.
        plans: The current plan and its successors.
        line: The line.
        limits: Deadlines.
        experts: Numbers that the forward computes with; the master is float32.
    """

    def __init__(
        self,
        links: GroupLinks,
        plans: PlanSource,
        *,
        line: str,
        limits: TrainLimits = TrainLimits(),
        experts: ExpertFormat = ExpertFormat.FP32,
    ) -> None:
        self._links = links
        self._experts = experts
        self._plans = plans
        self._line = line
        self._limits = limits
        self._plan = plans.current()

    @property
    def plan_version(self) -> int:
        """See `ExpertSide`."""
        return self._plan.version

    def begin(self, tag: StepTag) -> None:
        """See `ExpertSide`."""
        self._plan = self._plans.current()

    def executor(self, tag: StepTag, micro_batch: int) -> TrainableExpertExecutor:
        """See `ExpertSide`."""
        return _RemoteTraining(self, {**tag.to_meta(), "micro_batch": micro_batch})

    def eval_executor(self, step: int) -> ExpertExecutor:
        """See `ExpertSide`."""
        return _RemoteEvaluation(self, step)

    def squares(self, tag: StepTag) -> dict[str, float]:
        """See `ExpertSide`."""
        squares: dict[str, float] = {}
        for group, reply in self._all("train_norms", tag.to_meta()).items():
            names = owned_names(self._plan.experts_of(group))
            squares.update(zip(names, reply.arrays[0].tolist(), strict=True))
        return squares

    def prepare(self, tag: StepTag, plan: UpdatePlan) -> dict[str, str]:
        """See `ExpertSide`."""
        replies = self._all("train_prepare", {**tag.to_meta(), **plan.to_meta()})
        return {
            str(self._plan.peers[group].incarnation): str(reply.meta["digest"])
            for group, reply in replies.items()
        }

    def apply(self, tag: StepTag) -> None:
        """See `ExpertSide`."""
        self._all("train_apply", tag.to_meta(), check_plan=False)

    def abort(self, tag: StepTag) -> None:
        """See `ExpertSide`."""
        for peer in self._plan.peers.values():
            message = self._message("train_abort", tag.to_meta())
            try:
                self._wait("train_abort", peer, self._send(peer, message), self._limits.call_s)
            except StepAbortedError:
                continue  # dead or stuck: its next life has no master, a later attempt fences it

    def settle(self, step: int) -> bool:
        """See `ExpertSide`.

        Raises:
            DeadlineError: a lost group was not rebuilt within `rebuild_s`.
        """
        deadline = Deadline.after(
            self._limits.rebuild_s, operation="rebuild of lost groups", peer="controller"
        )
        while True:
            self._plan = self._plans.current()
            try:
                replies = self._all("train_status", {}, check_plan=False).values()
                return all(r.meta["has_master"] and r.meta["step"] == step for r in replies)
            except StepAbortedError:
                deadline.check()
                self._wait_newer(min(_SETTLE_SLICE_S, deadline.left_s()))

    def load(self, entry: str | None, *, step: int, seed: int) -> None:
        """See `ExpertSide`."""
        self._plan = self._plans.current()
        meta: Meta = {
            "line": self._line, "entry": entry, "step": step, "seed": seed,
            "experts": str(self._experts),
        }  # fmt: skip
        self._all("train_load", meta, limit_s=self._limits.files_s)

    def save(self, staged: StagedEntry) -> list[ShardInfo]:
        """See `ExpertSide`."""
        return self._write("train_save", staged)

    def publish(self, staged: StagedEntry) -> list[ShardInfo]:
        """See `ExpertSide`."""
        return self._write("train_publish", staged)

    def dispatch(
        self, op: str, meta: Meta, parts: list[Part], arrays: Callable[[Part], tuple[Array, ...]]
    ) -> list[Array]:
        """Send every part to its group and wait for all; the first array of each reply.

        Raises:
            StepAbortedError: see the module docstring.
        """
        self._check_plan()
        self._require(part.group for part in parts)
        peers = [self._plan.peers[part.group] for part in parts]
        pendings = [
            self._send(peer, self._message(op, meta, arrays(part)))
            for peer, part in zip(peers, parts, strict=True)
        ]
        return [
            self._wait(op, peer, pending, self._limits.call_s).arrays[0]
            for peer, pending in zip(peers, pendings, strict=True)
        ]

    def split(self, layer: int, expert_ids_TK: torch.Tensor) -> list[Part]:
        """Parts of a batch under the attempt's plan."""
        rows_P, experts_P = pairs_of(expert_ids_TK.cpu().numpy())
        homes = self._plan.homes[layer]
        return split_pairs(rows_P, experts_P, homes, num_rows=expert_ids_TK.shape[0])

    def _write(self, op: str, staged: StagedEntry) -> list[ShardInfo]:
        meta: Meta = {"line": staged.line, "step": staged.step, "path": staged.path}
        replies = self._all(op, meta, limit_s=self._limits.files_s, shard=True)
        return [_shard_info(reply.arrays[0]) for reply in replies.values()]

    def _all(
        self,
        op: str,
        meta: Meta,
        *,
        limit_s: float | None = None,
        check_plan: bool = True,
        shard: bool = False,
    ) -> dict[str, Message]:
        """One call to every group, at the same time."""
        if check_plan:
            self._check_plan()
        self._require(self._plan.owners())
        peers: dict[str, GroupPeer] = dict(sorted(self._plan.peers.items()))
        pendings = {}
        for group, peer in peers.items():
            own = {**meta, "shard": f"experts-{group}"} if shard else dict(meta)
            pendings[group] = self._send(peer, self._message(op, own))
        limit = limit_s if limit_s is not None else self._limits.call_s
        return {
            group: self._wait(op, peers[group], pending, limit)
            for group, pending in pendings.items()
        }

    def _message(self, op: str, meta: Meta, arrays: tuple[Array, ...] = ()) -> Message:
        return Message(op=op, meta={**meta, "layout": self._plan.layout}, arrays=arrays)

    def _send(self, peer: GroupPeer, message: Message) -> Pending:
        deadline = self._deadline(message.op, peer)
        while True:
            try:
                with self._aborting(message.op, peer):
                    return self._links.send(peer, message, lane=Lane.TRAIN)
            except CapacityError:
                with self._aborting(message.op, peer):
                    deadline.check(remedy="raise lanes.train.credit_bytes or micro_batches")
                time.sleep(_CREDIT_PAUSE_S)  # credits come back as the group works

    def _wait(self, op: str, peer: GroupPeer, pending: Pending, limit_s: float) -> Message:
        deadline = Deadline.after(limit_s, operation=op, peer=str(peer.incarnation))
        with self._aborting(op, peer):
            return self._links.wait(pending, deadline)

    @contextmanager
    def _aborting(self, op: str, peer: GroupPeer) -> Iterator[None]:
        """Failures of a transport call abort the attempt."""
        try:
            yield
        except (PeerLostError, DeadlineError) as error:
            self._links.suspect(peer.incarnation, error)
            if isinstance(error, PeerLostError):
                self._links.forget(peer.incarnation)
            raise _aborted(op, peer, error) from error
        except (StaleVersionError, PlanError) as error:  # another layout has begun there
            raise _aborted(op, peer, error) from error

    def _check_plan(self) -> None:
        current = self._plans.current().version
        if current != self._plan.version:
            raise StepAbortedError(
                f"placement plan {self._plan.version} was replaced by {current}",
                remedy="retry the step under the new plan",
                reason="plan_changed",
            )

    def _require(self, groups: Iterable[str]) -> None:
        """The plan may go on serving from replicas without a home, but only homes train."""
        lost = sorted(set(groups) - self._plan.peers.keys())
        if lost:
            raise StepAbortedError(
                f"plan {self._plan.version} serves without {', '.join(lost)}, whose experts train "
                "nowhere else",
                remedy="the step is retried once they are rebuilt",
                reason="home_lost",
            )

    def _wait_newer(self, limit_s: float) -> PlacementPlan | None:
        deadline = Deadline.after(limit_s, operation="a newer plan", peer="controller")
        try:
            return self._plans.wait_newer(self._plan.version, deadline)
        except DeadlineError:
            return None  # the caller looks again until its own deadline

    def _deadline(self, op: str, peer: GroupPeer) -> Deadline:
        return Deadline.after(self._limits.call_s, operation=op, peer=str(peer.incarnation))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Operation and metadata of a dispatch."""

    op: str
    meta: Meta


class _RemoteTraining:
    """`TrainableExpertExecutor` of one micro-batch of one attempt."""

    def __init__(self, experts: RemoteExperts, meta: Meta) -> None:
        self._experts = experts
        self._meta = meta
        self._sent: dict[int, tuple[list[Part], torch.Tensor]] = {}

    def forward(
        self, layer: int, latents_TL: torch.Tensor, expert_ids_TK: torch.Tensor
    ) -> torch.Tensor:
        parts = self._experts.split(layer, expert_ids_TK)
        self._sent[layer] = (parts, expert_ids_TK)
        call = _Call(op="train_forward", meta={**self._meta, "layer": layer})
        return _forward(self._experts, call, parts, latents_TL, expert_ids_TK)

    def backward(self, layer: int, grad_rows_TKL: torch.Tensor) -> torch.Tensor:
        parts, expert_ids_TK = self._sent.pop(layer)
        grad_PL = grad_rows_TKL.reshape(-1, grad_rows_TKL.shape[-1]).cpu().numpy()
        results = self._experts.dispatch(
            "train_backward",
            {**self._meta, "layer": layer},
            parts,
            lambda part: (np.ascontiguousarray(grad_PL[part.pairs]),),
        )
        dx_PL = _gather(parts, results, grad_PL.shape)
        return sum_pairs(torch.from_numpy(dx_PL).view(grad_rows_TKL.shape), expert_ids_TK.cpu()).to(
            grad_rows_TKL.device
        )


class _RemoteEvaluation:
    """`ExpertExecutor` under the committed master of one step."""

    def __init__(self, experts: RemoteExperts, step: int) -> None:
        self._experts = experts
        self._step = step

    def forward(
        self, layer: int, latents_TL: torch.Tensor, expert_ids_TK: torch.Tensor
    ) -> torch.Tensor:
        parts = self._experts.split(layer, expert_ids_TK)
        call = _Call(op="train_eval", meta={"step": self._step, "layer": layer})
        return _forward(self._experts, call, parts, latents_TL, expert_ids_TK)


def _forward(
    experts: RemoteExperts,
    call: _Call,
    parts: list[Part],
    latents_TL: torch.Tensor,
    expert_ids_TK: torch.Tensor,
) -> torch.Tensor:
    latents = np.ascontiguousarray(latents_TL.detach().cpu().numpy(), dtype=np.float32)
    results = experts.dispatch(
        call.op,
        call.meta,
        parts,
        lambda part: (take_rows(latents, part.latent_rows), part.rows_P, part.experts_P),
    )
    rows_PL = _gather(parts, results, (expert_ids_TK.numel(), latents.shape[1]))
    return torch.from_numpy(rows_PL).view(*expert_ids_TK.shape, -1).to(latents_TL.device)


def _gather(
    parts: list[Part], results: list[Array], shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    rows_PL = np.empty(shape, dtype=np.float32)
    for part, result in zip(parts, results, strict=True):
        rows_PL[part.pairs] = result
    return rows_PL


def _aborted(op: str, peer: GroupPeer, error: K3RayError) -> StepAbortedError:
    return StepAbortedError(
        f"{op} at {peer.incarnation} failed: {error.message}",
        remedy="the attempt is dropped and tried again; see `k3ray status`",
        reason=str(error.fields.get("reason", error.code)),
        peer=str(peer.incarnation),
    )


def _shard_info(array: Array) -> ShardInfo:
    body = json.loads(array.tobytes())
    tensors = tuple(TensorInfo(**{**t, "shape": tuple(t["shape"])}) for t in body["tensors"])
    return ShardInfo(name=body["name"], size_bytes=body["size_bytes"], tensors=tensors)
