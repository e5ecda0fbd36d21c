"""`ClusterView`: the world as `decide` sees it, one frozen value. No handles, no clock, no Ray.

Times are monotonic seconds of the controller. An actor's view is of its current life.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from k3ray.config.supernode import SupernodeSpec
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
    """An open request keeps a version alive."""

    request_id: str
    version: str
    since_s: float


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
    """The number of stacks is being changed, from `previous` to `target`, since `since_s`."""

    previous: int
    target: int
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Everything a decision may depend on.

    Args:
        plan_peers: Maps a group to its term in the plan.
        scale: The change of the number of stacks that is under way.
        loads: Open requests of a stack by its last answer.
        holder_sets: Sets of groups of which one at least must serve, for some expert's sake.
    """

    actors: Mapping[str, ActorView]
    plan: int = 0
    plan_peers: Mapping[str, int] = field(default_factory=dict)
    holder_sets: frozenset[frozenset[str]] = frozenset()
    scale: ScaleView | None = None
    loads: Mapping[str, int] = field(default_factory=dict)
    versions: tuple[VersionView, ...] = ()
    pins: tuple[PinView, ...] = ()
    leases: tuple[LeaseView, ...] = ()
    attempts: tuple[AttemptView, ...] = ()


def group_ids(spec: SupernodeSpec) -> tuple[str, ...]:
    """Actor ids of the expert groups, in partition order."""
    return tuple(f"group-{index}" for index in range(spec.groups))


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
