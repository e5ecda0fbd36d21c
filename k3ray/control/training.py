"""`TrainingLedger`: leases, step attempts and commits of the lines. No Ray, no torch.

A step commits only under the line's current lease, as the open attempt, and only if every holder
named in its record is alive in that very life: acks of dead incarnations count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from k3ray.control.leases import Lease, LeaseRequest, grant, lost
from k3ray.control.ledger import Ledger
from k3ray.control.records import (
    AttemptAborted,
    AttemptBegun,
    CheckpointCommitted,
    LeaseEnded,
    LeaseGranted,
    StepCommitted,
)
from k3ray.control.view import AttemptView, LeaseView
from k3ray.errors import DataError, StepAbortedError
from k3ray.ids import Incarnation, new_id


class TrainingLedger:
    """See the module. Deadlines are monotonic seconds; a lease found in the journal of an earlier
    controller gets a fresh one."""

    def __init__(self, ledger: Ledger, *, ttl_s: float, now_s: float) -> None:
        self.ledger = ledger
        self.ttl_s = ttl_s
        self._deadlines = dict.fromkeys(ledger.state.leases, now_s + ttl_s)
        self._gone: set[str] = set()

    def acquire(self, request: LeaseRequest, *, now_s: float, now_unix_s: float) -> Lease:
        """Take the training lease of a line.

        Raises:
            LineBusyError: somebody holds it.
        """
        state = self.ledger.state
        record = grant(
            request,
            state.lease_of_line(request.line),
            last_term=state.lease_terms.get(request.line, 0),
            lease_id=new_id("lease"),
            now_unix_s=now_unix_s,
        )
        self.ledger.write(record)
        self._deadlines[record.lease_id] = now_s + self.ttl_s
        return self._lease(record)

    def renew(self, lease_id: str, *, now_s: float) -> Lease:
        """Push the deadline out.

        Raises:
            LeaseLostError: the lease is over.
        """
        record = self._held(lease_id)
        self._deadlines[lease_id] = now_s + self.ttl_s
        return self._lease(record)

    def end(self, lease_id: str, reason: str) -> None:
        """Release or expire a lease; its open attempt is aborted first. Idempotent."""
        lease = self.ledger.state.leases.get(lease_id)
        if lease is None:
            return
        self.abort(lease.line, f"lease ended: {reason}")
        self.ledger.write(LeaseEnded(lease_id=lease_id, reason=reason))
        self._deadlines.pop(lease_id, None)
        self._gone.discard(lease_id)

    def holder_gone(self, lease_id: str) -> None:
        """The holder's process is known to be dead: the lease ends at the next decision."""
        if lease_id in self.ledger.state.leases:
            self._gone.add(lease_id)

    def begin_attempt(self, lease_id: str, line: str, step: int, *, plan: int) -> int:
        """Open the next attempt at `step`; an attempt still open is aborted.

        Attempt numbers grow over the whole life of the line, so a replay of a step after going
        back to a checkpoint never shares a number with the first time.

        Raises:
            LeaseLostError: the caller does not hold the line.
        """
        self._held(lease_id, line)
        self.abort(line, "a new attempt began")
        last = self.ledger.state.last_attempts.get(line)
        attempt = (last.attempt if last else 0) + 1
        self.ledger.write(
            AttemptBegun(lease_id=lease_id, line=line, step=step, attempt=attempt, plan=plan)
        )
        return attempt

    def abort(self, line: str, reason: str) -> None:
        """Give up the open attempt of `line`, if there is one."""
        begun = self.ledger.state.attempts.get(line)
        if begun is not None:
            self.ledger.write(
                AttemptAborted(line=line, step=begun.step, attempt=begun.attempt, reason=reason)
            )

    def commit_step(
        self,
        lease_id: str,
        body: Mapping[str, JsonValue],
        *,
        alive: Mapping[str, int],
    ) -> None:
        """Commit the open attempt; idempotent for the attempt that was committed last.

        Args:
            lease_id: The line's lease.
            body: The trainer's record: `line`, `step`, `attempt` and whatever else it keeps;
                `holder_digests`, when given, maps "group-0#3" to a digest.
            alive: Term by actor id of every group, 0 for one that is not ready.

        Raises:
            LeaseLostError: the caller does not hold the line.
            StepAbortedError: another attempt is open, or a holder died since it acknowledged.
            DataError: the record lacks a field.
        """
        line, step, attempt = _tag(body)
        self._held(lease_id, line)
        done = self.ledger.state.steps.get(line)
        if done is not None and (done.step, done.attempt) == (step, attempt):
            return
        begun = self.ledger.state.attempts.get(line)
        if begun is None or (begun.step, begun.attempt) != (step, attempt):
            current = f"attempt {begun.attempt} of step {begun.step} is" if begun else "none is"
            raise _aborted(line, step, attempt, f"{current} open")
        for holder in _holders(body):
            if alive.get(holder.actor) not in (None, holder.term):
                raise _aborted(line, step, attempt, f"{holder} is not alive any more")
        self.ledger.write(
            StepCommitted(lease_id=lease_id, line=line, step=step, attempt=attempt, body=dict(body))
        )

    def commit_checkpoint(self, lease_id: str, line: str, step: int, entry: str) -> None:
        """Record a whole checkpoint.

        Raises:
            LeaseLostError: the caller does not hold the line.
        """
        self._held(lease_id, line)
        self.ledger.write(CheckpointCommitted(line=line, step=step, entry=entry))

    def require(self, lease_id: str, line: str) -> None:
        """Raise `LeaseLostError` unless `lease_id` holds `line`."""
        self._held(lease_id, line)

    def leases(self) -> tuple[LeaseView, ...]:
        """Leases as `decide` sees them."""
        return tuple(
            LeaseView(
                lease_id=lease.lease_id, line=lease.line, job=lease.job,
                deadline_s=self._deadlines[lease.lease_id],
                holder_gone=lease.lease_id in self._gone,
            )
            for lease in self.ledger.state.leases.values()
        )  # fmt: skip

    def attempts(self) -> tuple[AttemptView, ...]:
        """Open attempts as `decide` sees them."""
        return tuple(
            AttemptView(line=a.line, step=a.step, attempt=a.attempt, plan=a.plan)
            for a in self.ledger.state.attempts.values()
        )

    def _held(self, lease_id: str, line: str | None = None) -> LeaseGranted:
        record = self.ledger.state.leases.get(lease_id)
        if record is None or (line is not None and record.line != line):
            raise lost(lease_id)
        return record

    def _lease(self, record: LeaseGranted) -> Lease:
        return Lease(
            id=record.lease_id, line=record.line, term=record.term, job=record.job,
            host=record.host, pid=record.pid, ttl_s=self.ttl_s,
        )  # fmt: skip


def _tag(body: Mapping[str, JsonValue]) -> tuple[str, int, int]:
    line, step, attempt = (body.get(name) for name in ("line", "step", "attempt"))
    if not isinstance(line, str) or not isinstance(step, int) or not isinstance(attempt, int):
        raise DataError(
            f"a step record needs line, step and attempt, got {line!r}, {step!r}, {attempt!r}",
            remedy="commit what begin_attempt returned",
        )
    return line, step, attempt


def _holders(body: Mapping[str, JsonValue]) -> Sequence[Incarnation]:
    digests = body.get("holder_digests")
    if not isinstance(digests, dict):
        return ()
    return tuple(Incarnation.parse(name) for name in digests if "#" in name)


def _aborted(line: str, step: int, attempt: int, why: str) -> StepAbortedError:
    return StepAbortedError(
        f"step {step} attempt {attempt} of {line} cannot commit: {why}",
        remedy="begin the next attempt",
        line=line,
        step=step,
        attempt=attempt,
    )
