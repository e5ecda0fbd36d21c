"""Training leases: one holder per line, with a deadline that the holder keeps pushing out.

A lease is (id, term): the term grows with every lease of the line, so what an earlier holder
sends can be refused. Pure functions; the ledger journals what they return.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3ray.control.records import LeaseGranted
from k3ray.errors import LeaseLostError, LineBusyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What the holder gets; renew it well before `ttl_s` is over."""

    id: str
    line: str
    term: int
    job: str
    host: str
    pid: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Who asks for a line."""

    line: str
    job: str
    host: str
    pid: int


def grant(
    request: LeaseRequest,
    held: LeaseGranted | None,
    *,
    last_term: int,
    lease_id: str,
    now_unix_s: float,
) -> LeaseGranted:
    """The record of a new lease.

    Raises:
        LineBusyError: `held` is somebody's; names job, host and age.
    """
    if held is not None:
        age_s = max(0.0, now_unix_s - held.granted_unix_s)
        raise LineBusyError(
            f"line {request.line!r} is being trained by job {held.job!r} (pid {held.pid} on "
            f"{held.host}) for {age_s:.0f} s",
            remedy="wait until it ends, stop it, or train another line",
            line=request.line,
            holder=held.job,
            host=held.host,
            pid=held.pid,
            age_s=round(age_s, 1),
        )
    return LeaseGranted(
        lease_id=lease_id,
        line=request.line,
        term=last_term + 1,
        job=request.job,
        host=request.host,
        pid=request.pid,
        granted_unix_s=now_unix_s,
    )


def lost(lease_id: str) -> LeaseLostError:
    """The error for a caller whose lease is over."""
    return LeaseLostError(
        f"lease {lease_id} is over; its open step was aborted",
        remedy="acquire the line's lease again and resume from its last checkpoint",
        lease_id=lease_id,
    )
