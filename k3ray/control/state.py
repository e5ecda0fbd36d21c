"""`ControlState`: everything the journal says, folded from its records. Pure values.

`apply(state, record)` is the only way a state changes. Records that contradict the state (a lower
term, a commit without its attempt) raise `JournalError`: the controller checks before it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar, assert_never

from k3ray.control.records import (
    ActorLost,
    ActorReady,
    AttemptAborted,
    AttemptBegun,
    CheckpointCommitted,
    LeaseEnded,
    LeaseGranted,
    PlanSwitched,
    Record,
    Scaled,
    StepCommitted,
    SupernodeDown,
    SupernodeUp,
    TermGranted,
    VersionActivated,
    VersionCommitted,
    VersionRetired,
)
from k3ray.errors import JournalError
from k3ray.ids import Role
from k3ray.placement.layout import Layout

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFacts:
    """The current life of an actor: granted, then (perhaps) ready, then (perhaps) lost."""

    term: int
    role: Role
    ready: ActorReady | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """A live version: committed, and `active` once every holder had it. `restored`: it was one
    before."""

    version: str
    line: str
    step: int
    active: bool = False
    restored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """See the module.

    Args:
        scaled: The last change of the size since the supernode came up.
        layout: The layout that was switched to last since then; None for the first one.
        last_layout: Highest number of any layout since then.
        latest: Maps a line to its latest active version.
    """

    up: SupernodeUp | None = None
    scaled: Scaled | None = None
    layout: Layout | None = None
    last_layout: int = 1
    actors: Mapping[str, ActorFacts] = field(default_factory=dict)
    plan: PlanSwitched | None = None
    versions: Mapping[str, VersionFacts] = field(default_factory=dict)
    latest: Mapping[str, str] = field(default_factory=dict)
    leases: Mapping[str, LeaseGranted] = field(default_factory=dict)
    lease_terms: Mapping[str, int] = field(default_factory=dict)
    attempts: Mapping[str, AttemptBegun] = field(default_factory=dict)
    last_attempts: Mapping[str, AttemptBegun] = field(default_factory=dict)
    steps: Mapping[str, StepCommitted] = field(default_factory=dict)
    checkpoints: Mapping[str, CheckpointCommitted] = field(default_factory=dict)

    def term_of(self, actor: str) -> int:
        """Highest term ever granted to `actor`, 0 when none was."""
        facts = self.actors.get(actor)
        return facts.term if facts else 0

    def lease_of_line(self, line: str) -> LeaseGranted | None:
        """The training lease that is held on `line`."""
        return next((lease for lease in self.leases.values() if lease.line == line), None)


def fold(records: Iterable[Record], start: ControlState | None = None) -> ControlState:
    """The state after `records`."""
    state = start or ControlState()
    for record in records:
        state = apply(state, record)
    return state


def apply(state: ControlState, record: Record) -> ControlState:
    """The state after one more record.

    Raises:
        JournalError: the record contradicts the state.
    """
    match record:
        case SupernodeUp():
            after = replace(state, up=record)
        case SupernodeDown():
            after = replace(state, up=None, scaled=None, layout=None, last_layout=1)
        case TermGranted() | ActorReady() | ActorLost():
            after = replace(state, actors=_with(state.actors, *_actor(state, record)))
        case PlanSwitched():
            before = state.plan.version if state.plan else 0
            _require(record.version > before, f"plan {record.version} after plan {before}")
            after = replace(state, plan=record, layout=_layout_of(state, record))
        case Scaled():
            number = record.layout.number if record.layout else 0
            after = replace(state, scaled=record, last_layout=max(state.last_layout, number))
        case VersionCommitted() | VersionActivated() | VersionRetired():
            after = _version(state, record)
        case LeaseGranted() | LeaseEnded():
            after = _lease(state, record)
        case AttemptBegun() | AttemptAborted() | StepCommitted():
            after = _training(state, record)
        case CheckpointCommitted():
            after = replace(state, checkpoints=_with(state.checkpoints, record.line, record))
        case _:
            assert_never(record)
    return after


def _layout_of(state: ControlState, plan: PlanSwitched) -> Layout | None:
    """The layout of a new plan: the one before, or the one that was prepared."""
    prepared = state.scaled.layout if state.scaled else None
    if prepared is not None and prepared.number == plan.layout:
        return prepared
    known = state.layout.number if state.layout else 1
    _require(plan.layout == known, f"plan {plan.version} has layout {plan.layout}, not {known}")
    return state.layout


def _actor(
    state: ControlState, record: TermGranted | ActorReady | ActorLost
) -> tuple[str, ActorFacts]:
    actor, term = record.incarnation.actor, record.incarnation.term
    facts = state.actors.get(actor)
    if isinstance(record, TermGranted):
        _require(term > state.term_of(actor), f"{record.incarnation} granted again")
        return actor, ActorFacts(term=term, role=record.role)
    if facts is None or facts.term != term:
        raise _contradiction(f"{record.incarnation} is not the current life")
    if isinstance(record, ActorReady):
        _require(not facts.lost, f"{record.incarnation} ready after it was lost")
        return actor, replace(facts, ready=record)
    return actor, replace(facts, lost=True)


def _version(
    state: ControlState, record: VersionCommitted | VersionActivated | VersionRetired
) -> ControlState:
    if isinstance(record, VersionCommitted):
        facts = VersionFacts(
            version=record.version, line=record.line, step=record.step, restored=record.restored
        )
        return replace(state, versions=_with(state.versions, record.version, facts))
    known = state.versions.get(record.version)
    if known is None:
        raise _contradiction(f"version {record.version} is not live")
    if isinstance(record, VersionActivated):
        versions = _with(state.versions, record.version, replace(known, active=True))
        return replace(
            state, versions=versions, latest=_with(state.latest, known.line, record.version)
        )
    _require(state.latest.get(known.line) != record.version, f"latest {record.version} was retired")
    return replace(state, versions=_without(state.versions, record.version))


def _lease(state: ControlState, record: LeaseGranted | LeaseEnded) -> ControlState:
    if isinstance(record, LeaseGranted):
        _require(state.lease_of_line(record.line) is None, f"line {record.line} is leased")
        return replace(
            state,
            leases=_with(state.leases, record.lease_id, record),
            lease_terms=_with(state.lease_terms, record.line, record.term),
        )
    lease = state.leases.get(record.lease_id)
    if lease is None:
        raise _contradiction(f"lease {record.lease_id} is not held")
    return replace(
        state,
        leases=_without(state.leases, record.lease_id),
        attempts=_without(state.attempts, lease.line),
    )


def _training(
    state: ControlState, record: AttemptBegun | AttemptAborted | StepCommitted
) -> ControlState:
    if isinstance(record, AttemptBegun):
        _require(record.lease_id in state.leases, f"attempt without lease {record.lease_id}")
        return replace(
            state,
            attempts=_with(state.attempts, record.line, record),
            last_attempts=_with(state.last_attempts, record.line, record),
        )
    begun = state.attempts.get(record.line)
    if begun is None or (begun.step, begun.attempt) != (record.step, record.attempt):
        raise _contradiction(
            f"step {record.step} attempt {record.attempt} of {record.line} is not open"
        )
    attempts = _without(state.attempts, record.line)
    if isinstance(record, AttemptAborted):
        return replace(state, attempts=attempts)
    return replace(state, attempts=attempts, steps=_with(state.steps, record.line, record))


def _with(mapping: Mapping[str, Value], key: str, value: Value) -> dict[str, Value]:
    return {**mapping, key: value}


def _without(mapping: Mapping[str, Value], key: str) -> dict[str, Value]:
    return {name: value for name, value in mapping.items() if name != key}


def _require(condition: bool, fact: str) -> None:
    if not condition:
        raise _contradiction(fact)


def _contradiction(fact: str) -> JournalError:
    return JournalError(
        f"journal record contradicts the state: {fact}",
        remedy="this is a bug or a damaged journal; keep the file for inspection",
    )
