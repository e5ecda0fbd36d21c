"""Splitting (token, expert) pairs by the group that holds the expert. Pure numpy.

Each part carries the unique latent rows its group needs, so a token goes to a group once however
many of its experts live there. Pairs keep ascending token order inside a part.
Legend: N latent rows, P pairs, E logical experts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3ray.ids import Incarnation
from k3ray.placement.plan import PlacementPlan

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one group gets.

    Args:
        group: Actor id of the group that is asked.
        pairs: Index of the part's pairs among all pairs, ascending.
        latent_rows: Unique rows of the latents, ascending.
        rows_P: [P of the part] int32, index into `latent_rows`.
        experts_P: [P of the part] int32 logical expert ids.
    """

    group: str
    pairs: Int64Array
    latent_rows: Int64Array
    rows_P: npt.NDArray[np.int32]
    experts_P: npt.NDArray[np.int32]


def choose_holders(
    plan: PlacementPlan, layer: int, avoided: Collection[Incarnation]
) -> tuple[str, ...]:
    """The group to ask for each expert of a layer: its first live holder that is not avoided,
    else its first live one, else its home (whose next life the caller waits for)."""
    good = {group for group, peer in plan.peers.items() if peer.incarnation not in avoided}
    homes = plan.homes[layer]
    if good >= set(homes):
        return homes
    return tuple(
        home if home in good else _instead(plan.holders(layer, expert), plan, good)
        for expert, home in enumerate(homes)
    )


def _instead(holders: Sequence[str], plan: PlacementPlan, good: Collection[str]) -> str:
    for wanted in (good, plan.peers):
        for group in holders:
            if group in wanted:
                return group
    return holders[0]


def split_pairs(
    rows_P: Int64Array, experts_P: Int64Array, groups_E: Sequence[str], *, num_rows: int
) -> list[Part]:
    """One part per group that holds any of `experts_P`, in order of the groups' names.

    Args:
        rows_P: [P] latent row of each pair, ascending.
        experts_P: [P] logical expert of each pair.
        groups_E: Group to ask for each logical expert of the layer.
        num_rows: N.
    """
    groups = sorted(set(groups_E))
    group_of_E = np.array([groups.index(group) for group in groups_E])
    group_of_P = group_of_E[experts_P]
    parts = []
    for index, group in enumerate(groups):
        pairs = np.flatnonzero(group_of_P == index)
        if not len(pairs):
            continue
        needed_N = np.zeros(num_rows, dtype=np.bool_)
        needed_N[rows_P[pairs]] = True
        place_N = np.cumsum(needed_N) - 1
        parts.append(
            Part(
                group=group,
                pairs=pairs,
                latent_rows=np.flatnonzero(needed_N),
                rows_P=place_N[rows_P[pairs]].astype(np.int32),
                experts_P=experts_P[pairs].astype(np.int32),
            )
        )
    return parts


def pairs_of(expert_ids_TK: Int64Array) -> tuple[Int64Array, Int64Array]:
    """(rows, experts) of all pairs of a batch, token by token."""
    num_tokens, top_k = expert_ids_TK.shape
    return np.repeat(np.arange(num_tokens), top_k), expert_ids_TK.reshape(-1)


def take_rows(latents: npt.NDArray[np.float32], rows: Int64Array) -> npt.NDArray[np.float32]:
    """Rows of a C-contiguous matrix; the matrix itself when all of them are taken."""
    return latents if len(rows) == latents.shape[0] else latents[rows]
