"""`ClusterView`: the world as `decide` sees it, one frozen value. No handles, no clock, no Ray.

Times are monotonic seconds of the controller. An actor's view is of its current life.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.records import Size
from k3ray.ids import Incarnation, Role


class ActorState(StrEnum):
    """Where an actor's current life stands."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    FENCING = "fencing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorView:
    """One expert group or attention stack.

    Args:
        term: Term of the current (or last) life, 0 before the first.
        since_s: When it came into `state`.
        versions: Committed weight versions that it acknowledged.
        busy: Operations under way by key ("load main@3-...", "plan 4"); never asked for twice.
        plan: Plan version that a stack acknowledged.
        layouts: Numbers of the layouts whose shares a group holds.
        num_failures: Lives in a row that ended before they held a version.
        num_op_failures: Loads, drops, pushes that failed in a row on this life.
        retry_at_s: Nothing is tried again before.
        note: Why it is in this state, for people.
    """

    actor: str
    role: Role
    term: int = 0
    state: ActorState = ActorState.ABSENT
    since_s: float = 0.0
    endpoint: str = ""
    node: str = ""
    pid: int = 0
    versions: frozenset[str] = frozenset()
    busy: frozenset[str] = frozenset()
    plan: int = 0
    layouts: frozenset[int] = frozenset()
    num_failures: int = 0
    num_op_failures: int = 0
    retry_at_s: float = 0.0
    note: str = ""

    @property
    def incarnation(self) -> Incarnation:
        """The current life."""
        return Incarnation(actor=self.actor, term=self.term)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionView:
    """A live version; `since_s` is when it was committed (or taken over by this controller)."""

    version: str
    line: str
    step: int
    active: bool
    latest: bool
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PinView:
    """An open request keeps a version alive.

    Args:
        holder: The ingress that asked for it; None before it was registered.
        orphan_since_s: Since when that ingress is gone.
    """

    request_id: str
    version: str
    since_s: float
    holder: Incarnation | None = None
    orphan_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A training lease; `holder_gone` when its process is known to be dead."""

    lease_id: str
    line: str
    job: str
    deadline_s: float
    holder_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """The open attempt of a line and the plan it began under."""

    line: str
    step: int
    attempt: int
    plan: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleView:
    """The size is being changed, from `previous` to `target`, since `since_s`."""

    previous: Size
    target: Size
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutView:
    """A layout whose shares are kept.

    Args:
        groups: Its groups, in ring order.
        holder_sets: Sets of groups of which one at least must serve, for some expert's sake.
    """

    number: int
    groups: tuple[str, ...]
    holder_sets: frozenset[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Everything a decision may depend on.

    Args:
        layout: The current layout.
        next_layout: The one that is being prepared.
        old_layout: The one before, until nobody uses it any more.
        layout_since_s: When the current layout became so.
        plan_peers: Maps a group to its term in the plan.
        scale: The change of the size that is under way.
        loads: Open requests of a stack by its last answer.
        pins_unknown_until_s: Before, requests may be open that this controller has not heard of.
    """

    actors: Mapping[str, ActorView]
    layout: LayoutView
    next_layout: LayoutView | None = None
    old_layout: LayoutView | None = None
    layout_since_s: float = 0.0
    plan: int = 0
    plan_peers: Mapping[str, int] = field(default_factory=dict)
    scale: ScaleView | None = None
    loads: Mapping[str, int] = field(default_factory=dict)
    versions: tuple[VersionView, ...] = ()
    pins: tuple[PinView, ...] = ()
    pins_unknown_until_s: float = 0.0
    leases: tuple[LeaseView, ...] = ()
    attempts: tuple[AttemptView, ...] = ()

    @property
    def live_layouts(self) -> frozenset[int]:
        """Numbers of the layouts whose shares are kept."""
        layouts = (self.layout, self.next_layout, self.old_layout)
        return frozenset(layout.number for layout in layouts if layout is not None)


def group_ids(num_groups: int) -> tuple[str, ...]:
    """Actor ids of so many expert groups, in ring order."""
    return tuple(f"group-{index}" for index in range(num_groups))


def wanted_groups(view: ClusterView) -> tuple[str, ...]:
    """Groups of the current and the next layout."""
    coming = view.next_layout.groups if view.next_layout else ()
    return tuple(dict.fromkeys((*view.layout.groups, *coming)))


def latest_version(view: ClusterView) -> str:
    """The line's latest version; empty before the first."""
    return next((v.version for v in view.versions if v.latest), "")


def serving_stacks(spec: SupernodeSpec, view: ClusterView) -> list[ActorView]:
    """Stacks of the spec that hold the latest version and the current plan, by number; one that
    the spec no longer has takes nothing new."""
    latest = latest_version(view)
    wanted = (view.actors.get(name) for name in stack_ids(spec))
    return [
        stack
        for stack in wanted
        if stack is not None
        and stack.state is ActorState.READY
        and stack.plan == view.plan > 0
        and latest in stack.versions
    ]


def stack_ids(spec: SupernodeSpec) -> tuple[str, ...]:
    """Actor ids of the attention stacks."""
    return tuple(f"stack-{index}" for index in range(spec.stacks))
