"""What `decide` can order, each with the reason why; plain values, carried out by the actor."""

from __future__ import annotations

from dataclasses import dataclass

from k3ray.control.view import PinView
from k3ray.ids import Incarnation, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireLease:
    """End a lease that lapsed; its open attempt is aborted with it."""

    lease_id: str
    line: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirePin:
    """Forget a pin that reached its maximum age."""

    request_id: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortAttempt:
    """The open attempt of a line can no longer be whole."""

    line: str
    step: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceActor:
    """Make sure that a life is over (SIGKILL) before its replacement allocates."""

    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartActor:
    """Grant the next term and start a new life."""

    actor: str
    role: Role
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVersion:
    """Have an actor hold a committed version."""

    incarnation: Incarnation
    version: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropVersion:
    """Have an actor free a version that is no longer live."""

    incarnation: Incarnation
    version: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlan:
    """Make the next plan from the current lives of groups that hold every live version; every
    expert has a holder among them by that layout."""

    peers: tuple[Incarnation, ...]
    layout: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetActor:
    """An actor that the spec no longer has is gone for good."""

    actor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldLayouts:
    """Have a group hold its shares of these layouts, and nothing else."""

    incarnation: Incarnation
    layouts: frozenset[int]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireLayout:
    """Nobody asks by the layout before the current one any more."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndScale:
    """The change of the size is complete."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBackScale:
    """The change of the size failed: go back to the size before."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """Give the current plan to a stack."""

    incarnation: Incarnation
    plan: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivateVersion:
    """Every holder acknowledged: the version becomes its line's latest."""

    version: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireVersion:
    """A version ends: replaced and unpinned (`failed` False), or it could not be activated."""

    version: str
    failed: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForPins:
    """A publish has to wait: pinned older versions fill the bound. Nothing is carried out."""

    line: str
    pins: tuple[PinView, ...]
    reason: str


Command = (
    ExpireLease
    | ExpirePin
    | AbortAttempt
    | FenceActor
    | StartActor
    | LoadVersion
    | DropVersion
    | SwitchPlan
    | ForgetActor
    | HoldLayouts
    | RetireLayout
    | EndScale
    | RollBackScale
    | PushPlan
    | ActivateVersion
    | RetireVersion
    | WaitForPins
)


def load_key(version: str) -> str:
    """Key in `ActorView.busy` of a load or drop of `version` under way."""
    return f"version {version}"


LAYOUTS_KEY = "layouts"
"""Key in `ActorView.busy` of a change of the layouts that a group holds."""


def plan_key(plan: int) -> str:
    """Key in `ActorView.busy` of a plan being pushed."""
    return f"plan {plan}"
