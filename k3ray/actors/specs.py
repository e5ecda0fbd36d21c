"""What an actor is born with: `GroupSpec` and `StackSpec`; plain values, pickled by Ray once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3ray.config.model import TextConfig
from k3ray.config.numeric import NumericMode
from k3ray.config.supernode import DeadlineConfig, EngineConfig, LanesConfig
from k3ray.ids import Incarnation
from k3ray.placement.layout import GroupShare

NAMESPACE = "k3ray"
CONTROLLER_NAME = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One life of an expert group.

    Args:
        incarnation: Actor id ("group-0") and term.
        text: Model sizes.
        shares: Experts held and owned (whose master trains here) by each live layout's number.
        line: The line whose master this group trains.
        store_dir: Root of the weight store.
        socket_dir: Folder for the data-plane socket (short: Unix socket paths have 107 bytes).
    """

    incarnation: Incarnation
    text: TextConfig
    shares: Mapping[int, GroupShare]
    line: str
    store_dir: str
    socket_dir: str
    lanes: LanesConfig
    numeric_mode: NumericMode
    deadlines: DeadlineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSpec:
    """One life of an attention stack (fields as in `GroupSpec`)."""

    incarnation: Incarnation
    text: TextConfig
    line: str
    store_dir: str
    engine: EngineConfig
    numeric_mode: NumericMode
    deadlines: DeadlineConfig
