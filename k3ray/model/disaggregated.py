"""`DisaggregatedExecutor`: the experts of a committed version on remote groups; serving side.

Pairs are split by the plan's homes; each group gets its unique latents once and returns one row
per pair. The expert forward is pure, so a part whose group was lost is simply sent again to the
group's next life, as soon as a newer plan names it. Results do not depend on the partition.
Legend: T tokens, K experts per token, L latent width, N latent rows, P pairs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from k3ray.clock import Deadline
from k3ray.errors import CapacityError, DeadlineError, PeerLostError, TransportError
from k3ray.model.dispatch import Int64Array, Part, pairs_of, split_pairs, take_rows
from k3ray.model.group_links import GroupLinks, PlanSource
from k3ray.placement.plan import GroupPeer, PlacementPlan
from k3ray.transport.protocol import Lane, Message, Pending

DECODE_TOKENS = 64
"""Batches up to this size must be answered within `hop_s`, larger ones within `chunk_s`."""

_CREDIT_PAUSE_S = 0.0005

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class HopLimits:
    """Deadlines in seconds: one hop of a small or a large batch, and a group's rebuild."""

    hop_s: float = 1.0
    chunk_s: float = 10.0
    rebuild_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """All pairs of one layer's call (or those of a lost part), and where results go."""

    layer: int
    latents_NL: FloatArray
    rows_P: Int64Array
    experts_P: Int64Array


@dataclass(slots=True, kw_only=True)
class _Hop:
    """One part in flight; `pending` is None when its group could not be reached."""

    part: Part
    peer: GroupPeer
    pending: Pending | None
    error: TransportError | None = None


class DisaggregatedExecutor:
    """An `ExpertExecutor` of one weight version on one lane; used by one thread.

    Args:
        links: Connections of this thread.
        plans: The current plan and its successors.
        version: Weight version text.
        lane: Priority at the groups.
        limits: Deadlines.
    """

    def __init__(
        self,
        links: GroupLinks,
        plans: PlanSource,
        *,
        version: str,
        lane: Lane = Lane.SERVE,
        limits: HopLimits = HopLimits(),
    ) -> None:
        self._links = links
        self._plans = plans
        self._version = version
        self._lane = lane
        self._limits = limits

    def forward(
        self, layer: int, latents_TL: torch.Tensor, expert_ids_TK: torch.Tensor
    ) -> torch.Tensor:
        """See `ExpertExecutor.forward`.

        Raises:
            PeerLostError, DeadlineError: a group was lost and not rebuilt within `rebuild_s`.
            StaleVersionError: a group does not hold the version.
        """
        num_tokens, top_k = expert_ids_TK.shape
        latents_NL = np.ascontiguousarray(latents_TL.detach().cpu().numpy(), dtype=np.float32)
        rows_P, experts_P = pairs_of(expert_ids_TK.cpu().numpy())
        work = _Work(layer=layer, latents_NL=latents_NL, rows_P=rows_P, experts_P=experts_P)
        deadline = Deadline.after(
            self._limits.rebuild_s, operation="expert forward", peer="expert groups"
        )
        rows_PL = self._run(work, self._plans.current(), deadline)
        result_TKL = torch.from_numpy(rows_PL).view(num_tokens, top_k, -1)
        return result_TKL.to(latents_TL.device)

    def _run(self, work: _Work, plan: PlacementPlan, deadline: Deadline) -> FloatArray:
        """Rows of all pairs of `work`, [P, L]."""
        result_PL = np.empty((len(work.rows_P), work.latents_NL.shape[1]), dtype=np.float32)
        parts = split_pairs(
            work.rows_P, work.experts_P, plan.homes[work.layer], num_rows=len(work.latents_NL)
        )
        hops = [self._start(work, part, plan) for part in parts]
        for hop in hops:
            result_PL[hop.part.pairs] = self._finish(work, hop, plan, deadline)
        return result_PL

    def _start(self, work: _Work, part: Part, plan: PlacementPlan) -> _Hop:
        peer = plan.peers[part.group]
        message = Message(
            op="forward",
            meta={"version": self._version, "layer": work.layer, "plan": plan.version},
            arrays=(take_rows(work.latents_NL, part.latent_rows), part.rows_P, part.experts_P),
        )
        limit = self._hop_deadline(work, peer)
        while True:
            try:
                pending = self._links.send(peer, message, lane=self._lane)
                return _Hop(part=part, peer=peer, pending=pending)
            except CapacityError:
                limit.check(remedy="the lane's credits stay used up: raise lanes.*.credit_bytes")
                time.sleep(_CREDIT_PAUSE_S)  # credits come back with replies, within a hop
            except (PeerLostError, DeadlineError) as error:
                return _Hop(part=part, peer=peer, pending=None, error=error)

    def _finish(
        self, work: _Work, hop: _Hop, plan: PlacementPlan, deadline: Deadline
    ) -> FloatArray:
        """The part's rows, from the group or, after its loss, from its next life."""
        while True:
            error = hop.error
            if hop.pending is not None:
                try:
                    reply = self._links.wait(hop.pending, self._hop_deadline(work, hop.peer))
                    return np.asarray(reply.arrays[0], dtype=np.float32)
                except (PeerLostError, DeadlineError) as raised:
                    error = raised
            assert error is not None
            self._links.suspect(hop.peer.incarnation, error)
            stuck = isinstance(error, DeadlineError) and hop.pending is not None
            newer = self._newer_life(hop, plan, deadline, error, patient=not stuck)
            if newer is not None:
                self._links.forget(hop.peer.incarnation)
                self._links.num_retries += 1
                return self._run(_rest(work, hop.part), newer, deadline)

    def _newer_life(
        self,
        hop: _Hop,
        plan: PlacementPlan,
        deadline: Deadline,
        error: TransportError,
        *,
        patient: bool,
    ) -> PlacementPlan | None:
        """A plan in which the part's experts live elsewhere; None when a merely slow group is
        still current (`patient` false: its answer may yet come)."""
        current = self._plans.current()
        while not _moved(hop, current):
            if deadline.passed():
                raise error
            if not patient:
                return None
            try:
                current = self._plans.wait_newer(max(current.version, plan.version), deadline)
            except DeadlineError as late:
                raise error from late
        return current

    def _hop_deadline(self, work: _Work, peer: GroupPeer) -> Deadline:
        small = len(work.latents_NL) <= DECODE_TOKENS
        return Deadline.after(
            self._limits.hop_s if small else self._limits.chunk_s,
            operation="expert forward",
            peer=str(peer.incarnation),
        )


def _moved(hop: _Hop, plan: PlacementPlan) -> bool:
    peer = plan.peers.get(hop.part.group)
    return peer is None or peer.incarnation != hop.peer.incarnation


def _rest(work: _Work, part: Part) -> _Work:
    return _Work(
        layer=work.layer,
        latents_NL=work.latents_NL,
        rows_P=work.rows_P[part.pairs],
        experts_P=work.experts_P[part.pairs],
    )
