"""`DisaggregatedExecutor`: the experts of a committed version on remote groups; serving side.

Pairs are split by the groups that hold their experts; each group gets its unique latents once and
returns one row per pair. The expert forward is pure, so a part whose group was lost is simply sent
again: to replicas at once where there are any, else to the group's next life, as soon as a newer
plan names it. A part whose answer is merely late goes to replicas as well, and the first answer
counts. Results do not depend on who computed them.
Legend: T tokens, K experts per token, L latent width, N latent rows, P pairs.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from k3ray.clock import Deadline, monotonic
from k3ray.errors import (
    CapacityError,
    DeadlineError,
    PeerLostError,
    PlanError,
    StaleVersionError,
    TransportError,
)
from k3ray.ids import Incarnation
from k3ray.model.dispatch import (
    Int64Array,
    Part,
    choose_holders,
    pairs_of,
    split_pairs,
    take_rows,
)
from k3ray.model.group_links import GroupLinks, PlanSource
from k3ray.placement.plan import GroupPeer, PlacementPlan
from k3ray.transport.protocol import Lane, Message, Pending

DECODE_TOKENS = 64
"""Batches up to this size must be answered within `hop_s`, larger ones within `chunk_s`."""

_CREDIT_PAUSE_S = 0.0005
_PLAN_SLICE_S = 1.0

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
    """One part in flight; `pending` is None when its group could not be reached, `peer` when the
    plan has no live group for it."""

    part: Part
    plan: int
    peer: GroupPeer | None
    pending: Pending | None
    sent_s: float = 0.0
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
        groups_E = choose_holders(plan, work.layer, self._links.avoided())
        parts = split_pairs(work.rows_P, work.experts_P, groups_E, num_rows=len(work.latents_NL))
        hops = [self._start(work, part, plan) for part in parts]
        for hop in hops:
            result_PL[hop.part.pairs] = self._finish(work, hop, deadline)
        return result_PL

    def _start(self, work: _Work, part: Part, plan: PlacementPlan) -> _Hop:
        peer = plan.peers.get(part.group)
        if peer is None:
            return _Hop(
                part=part,
                plan=plan.version,
                peer=None,
                pending=None,
                error=_not_in(plan, part.group),
            )
        message = Message(
            op="forward",
            meta={"version": self._version, "layer": work.layer, "plan": plan.version},
            arrays=(take_rows(work.latents_NL, part.latent_rows), part.rows_P, part.experts_P),
        )
        limit = self._hop_deadline(work, peer)
        while True:
            try:
                pending = self._links.send(peer, message, lane=self._lane)
                return _Hop(
                    part=part, plan=plan.version, peer=peer, pending=pending, sent_s=monotonic()
                )
            except CapacityError:
                if limit.passed():
                    remedy = "the lane's credits stay used up: raise lanes.*.credit_bytes"
                    return _Hop(
                        part=part,
                        plan=plan.version,
                        peer=peer,
                        pending=None,
                        error=limit.error(remedy),
                    )
                time.sleep(_CREDIT_PAUSE_S)  # credits come back with replies, within a hop
            except (PeerLostError, DeadlineError) as error:
                return _Hop(part=part, plan=plan.version, peer=peer, pending=None, error=error)

    def _finish(self, work: _Work, hop: _Hop, deadline: Deadline) -> FloatArray:
        """The part's rows: from the group asked, else from whoever can give them."""
        error = hop.error
        if hop.pending is not None and hop.peer is not None:
            try:
                return self._answer(work, hop, hop.pending, hop.peer)
            except (PeerLostError, DeadlineError) as raised:
                error = raised
            except PlanError:
                newer = self._plans.current()
                if newer.version == hop.plan:
                    raise
                # It let go of the experts between two plans.
                return self._run(_rest(work, hop.part), newer, deadline)
        assert error is not None
        if hop.peer is not None:
            self._links.suspect(hop.peer.incarnation, error)
            if isinstance(error, PeerLostError):
                self._links.forget(hop.peer.incarnation)
        rest = _rest(work, hop.part)
        plan = self._plan_for(rest, hop, deadline, error)
        self._links.num_retries += 1
        return self._run(rest, plan, deadline)

    def _answer(self, work: _Work, hop: _Hop, pending: Pending, peer: GroupPeer) -> FloatArray:
        """The part's rows from its group, or from replicas where those are faster."""
        limit = self._hop_deadline(work, peer)
        small = self._lane is Lane.SERVE and len(work.latents_NL) <= DECODE_TOKENS
        if small and self._has_copies(work.layer, hop.part):
            early_s = max(0.0, hop.sent_s + self._links.hedge_s - monotonic())
            early = Deadline.after(early_s, operation="expert forward", peer=str(peer.incarnation))
            if not self._links.wait_any([pending], early):
                rows = self._hedged(work, hop, pending, peer, limit)
                if rows is not None:
                    return rows
        reply = self._links.wait(pending, limit)
        if small:
            self._links.note_hop(monotonic() - hop.sent_s)
        return np.asarray(reply.arrays[0], dtype=np.float32)

    def _has_copies(self, layer: int, part: Part) -> bool:
        return len(self._plans.current().holders(layer, int(part.experts_P[0]))) > 1

    def _hedged(
        self, work: _Work, hop: _Hop, late: Pending, peer: GroupPeer, limit: Deadline
    ) -> FloatArray | None:
        """Rows from other holders of a late part's experts; None if there are none, if one of them
        fails too, or if the late answer comes first (it is read by the caller)."""
        plan, rest = self._plans.current(), _rest(work, hop.part)
        avoided = self._links.avoided() | {peer.incarnation}
        if not _is_good(plan, rest, avoided):
            return None
        groups_E = choose_holders(plan, work.layer, avoided)
        parts = split_pairs(rest.rows_P, rest.experts_P, groups_E, num_rows=len(rest.latents_NL))
        copies = [self._start(rest, part, plan) for part in parts]
        asked = [copy.pending for copy in copies if copy.pending is not None]
        if len(asked) < len(copies):
            return None
        self._links.num_hedges += 1
        while not all(pending.done() for pending in asked):
            still = [pending for pending in (late, *asked) if not pending.done()]
            if late.done() or not self._links.wait_any(still, limit):
                return None
        try:
            replies = [self._links.wait(pending, limit) for pending in asked]
        except (TransportError, PlanError, StaleVersionError):
            return None
        self._links.pass_over(peer.incarnation)
        rows_PL = np.empty((len(rest.rows_P), rest.latents_NL.shape[1]), dtype=np.float32)
        for copy, reply in zip(copies, replies, strict=True):
            rows_PL[copy.part.pairs] = reply.arrays[0]
        return rows_PL

    def _plan_for(
        self, rest: _Work, hop: _Hop, deadline: Deadline, error: TransportError
    ) -> PlacementPlan:
        """The plan under which a failed part is sent again: the first in which nobody that failed
        is needed, or the current one when its group is merely slow (its answer may yet come)."""
        while True:
            plan = self._plans.current()
            if _is_good(plan, rest, self._links.avoided()):
                return plan
            if deadline.passed():
                raise error
            slow = isinstance(error, DeadlineError) and hop.peer is not None
            if slow and plan.peers.get(hop.part.group) == hop.peer:
                return plan
            # In slices, since a peer that failed is no longer avoided after a while.
            part_s = min(_PLAN_SLICE_S, deadline.left_s())
            with suppress(DeadlineError):
                self._plans.wait_newer(
                    plan.version,
                    Deadline.after(part_s, operation="a newer plan", peer="controller"),
                )

    def _hop_deadline(self, work: _Work, peer: GroupPeer) -> Deadline:
        small = len(work.latents_NL) <= DECODE_TOKENS
        return Deadline.after(
            self._limits.hop_s if small else self._limits.chunk_s,
            operation="expert forward",
            peer=str(peer.incarnation),
        )


def _is_good(plan: PlacementPlan, work: _Work, avoided: frozenset[Incarnation]) -> bool:
    """Whether every expert of `work` has a live holder that is not avoided."""
    groups_E = choose_holders(plan, work.layer, avoided)
    peers = [plan.peers.get(groups_E[expert]) for expert in set(work.experts_P.tolist())]
    return all(peer is not None and peer.incarnation not in avoided for peer in peers)


def _not_in(plan: PlacementPlan, group: str) -> PeerLostError:
    return PeerLostError(
        f"{group} is lost, and plan {plan.version} has no other holder of its experts",
        remedy="it is being rebuilt; see `k3ray status`",
        peer=group,
        operation="expert forward",
    )


def _rest(work: _Work, part: Part) -> _Work:
    return _Work(
        layer=work.layer,
        latents_NL=work.latents_NL,
        rows_P=work.rows_P[part.pairs],
        experts_P=work.experts_P[part.pairs],
    )
