"""`RunTable`: the idempotency table: which run a repeat of a request attaches to.

Bounded by count and by age. Only runs that nobody reads are forgotten; a run whose readers have
stalled is stopped. A pin outlives the last reader by a short grace, so that a client that
reconnects finds its weight version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from k3ray.errors import BadRequestError
from k3ray.serve.run import Run, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Who asked, and under which `x-request-id`."""

    tenant: str
    request_id: str

    @staticmethod
    def of(authorization: str | None, request_id: str) -> RunKey:
        """The tenant is a hash of the Authorization header: the table holds no secrets."""
        tenant = hashlib.blake2b((authorization or "").encode(), digest_size=16).hexdigest()
        return RunKey(tenant=tenant, request_id=request_id)

    @property
    def short(self) -> str:
        """A stable name of the key, safe to show."""
        text = f"{self.tenant}/{self.request_id}"
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A run and what its answers share.

    Args:
        digest: Of the call that began it.
        seed: The seed in use, the client's or ours.
        created_s: Unix seconds.
        num_prompt_tokens: Of all prompts together.
    """

    run: Run
    digest: str
    seed: int
    answer_id: str
    created_s: int
    num_prompt_tokens: int


class RunTable:
    """Entries by key.

    Args:
        max_entries: Most entries kept; the ones that ended first go first.
        retention_s: How long an ended (or paused) run is kept.
        resume_grace_s: How long a run without readers keeps its pin.
        stall_s: A run whose readers took nothing for so long is stopped.
    """

    def __init__(
        self, *, max_entries: int, retention_s: float, resume_grace_s: float, stall_s: float
    ) -> None:
        self._max_entries = max_entries
        self._retention_s = retention_s
        self._resume_grace_s = resume_grace_s
        self._stall_s = stall_s
        self._entries: dict[RunKey, Entry] = {}

    def find(self, key: RunKey, digest: str) -> Entry | None:
        """The entry under `key`, or None.

        Raises:
            BadRequestError: (409) the key belongs to another request.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.digest != digest:
            raise BadRequestError(
                "x-request-id: in use by a request with another body",
                remedy="use a fresh id for every request",
                param="x-request-id",
                code="idempotency_conflict",
                status=409,
            )
        return entry

    def add(self, key: RunKey, entry: Entry) -> None:
        """Remember a new run."""
        self._entries[key] = entry

    def drop(self, key: RunKey, entry: Entry) -> None:
        """Forget a run that never began."""
        if self._entries.get(key) is entry:
            del self._entries[key]

    def open_choices(self) -> int:
        """Choices that are being generated, or about to be."""
        runs = [entry.run for entry in self._entries.values()]
        return sum(
            len(run.choices) for run in runs if run.readers and run.state is not RunState.FINISHED
        )

    async def sweep(self, now_s: float) -> None:
        """Stop stalled runs, give back old pins, forget what is too old or too much."""
        for run in self._overdue(now_s):
            await run.release()
        idle = [item for item in self._entries.items() if _idle(item[1].run)]
        idle.sort(key=lambda item: item[1].run.changed_s)
        surplus = len(self._entries) - self._max_entries
        for index, (key, entry) in enumerate(idle):
            if index < surplus or now_s - entry.run.changed_s > self._retention_s:
                await entry.run.release()
                self.drop(key, entry)

    async def close(self) -> None:
        """Stop every run and give all pins back."""
        for entry in list(self._entries.values()):
            await entry.run.release()
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def _overdue(self, now_s: float) -> Sequence[Run]:
        runs = [entry.run for entry in self._entries.values()]
        return [
            run
            for run in runs
            if (run.state is RunState.RUNNING and now_s - run.read_s > self._stall_s)
            or (_idle(run) and run.pinned and now_s - run.changed_s > self._resume_grace_s)
        ]


def _idle(run: Run) -> bool:
    """Whether nobody reads it and nothing computes it."""
    return run.readers == 0 and run.state is not RunState.RUNNING
