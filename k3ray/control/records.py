"""What the journal holds: one frozen dataclass per fact, a tagged union of all of them.

A record is written (and fsynced) before the world may rely on the fact. Versions are texts
("main@3-0123456789ab"), times are Unix seconds. `encode` and `decode` are the file's edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from k3ray.errors import JournalError
from k3ray.ids import Incarnation, Role
from k3ray.placement.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SupernodeUp:
    """A controller took over (or began) a supernode; `partition` is that of its first layout."""

    type: Literal["supernode_up"] = "supernode_up"
    name: str
    preset: str
    line: str
    partition: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupernodeDown:
    """The supernode was stopped on purpose."""

    type: Literal["supernode_down"] = "supernode_down"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TermGranted:
    """A new life of an actor may start; all lower terms are refused from here on."""

    type: Literal["term_granted"] = "term_granted"
    incarnation: Incarnation
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorReady:
    """A life runs. `process_started_unix_s` guards against a reused pid when fencing."""

    type: Literal["actor_ready"] = "actor_ready"
    incarnation: Incarnation
    role: Role
    node: str
    pid: int
    process_started_unix_s: float
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLost:
    """A life has ended and its process is gone (fenced)."""

    type: Literal["actor_lost"] = "actor_lost"
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """A group's life and endpoint inside `PlanSwitched`."""

    incarnation: Incarnation
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSwitched:
    """A placement plan became current; homes and replicas follow from the layout."""

    type: Literal["plan_switched"] = "plan_switched"
    version: int
    layout: int
    peers: tuple[PeerRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many expert groups and attention stacks."""

    groups: int
    stacks: int

    def __str__(self) -> str:
        return f"{self.groups} groups, {self.stacks} stacks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """From here on this size is wanted; `ended` when all of it serves and nothing is left over.
    `layout` is prepared for it, unless the groups stay: the plan that switches to it is recorded by
    its own record. `failure` says why a change is taken back, in the record that does so."""

    type: Literal["scaled"] = "scaled"
    size: Size
    previous: Size
    layout: Layout | None = None
    ended: bool = False
    reason: str
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCommitted:
    """A weight version exists whole in the store; it is not the latest yet. `restored`: it was live
    before and is wanted again."""

    type: Literal["version_committed"] = "version_committed"
    version: str
    line: str
    step: int
    restored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionActivated:
    """Every group and stack holds the version: it is its line's latest."""

    type: Literal["version_activated"] = "version_activated"
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRetired:
    """No longer live: unused and replaced, or it failed to activate."""

    type: Literal["version_retired"] = "version_retired"
    version: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted:
    """A job holds the training lease of a line. `term` grows with every lease of the line."""

    type: Literal["lease_granted"] = "lease_granted"
    lease_id: str
    line: str
    term: int
    job: str
    host: str
    pid: int
    granted_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """Released by its holder, or lapsed."""

    type: Literal["lease_ended"] = "lease_ended"
    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptBegun:
    """An attempt at a step is open; older attempts of the line are refused."""

    type: Literal["attempt_begun"] = "attempt_begun"
    lease_id: str
    line: str
    step: int
    attempt: int
    plan: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAborted:
    """The open attempt was given up; it can no longer commit."""

    type: Literal["attempt_aborted"] = "attempt_aborted"
    line: str
    step: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """The step is done: commit, data ledger and recovery point in one.

    `body` is the trainer's own record (cursor range, sample digest, holder digests, loss).
    """

    type: Literal["step_committed"] = "step_committed"
    lease_id: str
    line: str
    step: int
    attempt: int
    body: dict[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """A checkpoint of the line exists whole in the store."""

    type: Literal["checkpoint_committed"] = "checkpoint_committed"
    line: str
    step: int
    entry: str


Record = (
    SupernodeUp
    | SupernodeDown
    | TermGranted
    | ActorReady
    | ActorLost
    | PlanSwitched
    | Scaled
    | VersionCommitted
    | VersionActivated
    | VersionRetired
    | LeaseGranted
    | LeaseEnded
    | AttemptBegun
    | AttemptAborted
    | StepCommitted
    | CheckpointCommitted
)

_ADAPTER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="type")])


def encode(record: Record) -> str:
    """One line of JSON, without a line end."""
    return _ADAPTER.dump_json(record).decode()


def decode(text: str) -> Record:
    """Inverse of `encode`.

    Raises:
        JournalError: not a record that this code knows.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise JournalError(
            f"the journal has a record that this code does not understand: {error}",
            remedy="run the k3ray version that wrote it",
        ) from error
