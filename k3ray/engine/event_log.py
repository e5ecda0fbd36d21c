"""`EventLog`: the events of every open and recently finished request, bounded, re-readable.

A reader says the last position it has (`after`, -1 for none) and gets what follows, as often as
it likes: reading consumes nothing. Every record carries the highest term seen; lower ones are
fenced off. Not thread-safe: the engine holds its lock. Time is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from k3ray.engine.request import Request, TokenEvent
from k3ray.errors import UnknownRequestError
from k3ray.ids import refuse_lower_term


@dataclass(slots=True, kw_only=True)
class Record:
    """Events of one request.

    Args:
        acked: Highest position a reader has confirmed to hold.
        dropped: Highest position that is no longer kept; -1 if none.
    """

    request: Request
    term: int
    polled_s: float
    acked: int
    dropped: int
    events: deque[TokenEvent] = field(default_factory=deque)
    finished_s: float | None = None


class EventLog:
    """Records by request id.

    Args:
        event_budget: Most events kept per request; more unread ones mean an orphan.
        finished_retention_s: How long a finished request stays readable.
        orphan_timeout_s: A request that nobody polls for so long is an orphan.
        max_finished: Most finished requests kept; the oldest go first.
    """

    def __init__(
        self,
        *,
        event_budget: int,
        finished_retention_s: float,
        orphan_timeout_s: float,
        max_finished: int = 4096,
    ) -> None:
        self._event_budget = event_budget
        self._finished_retention_s = finished_retention_s
        self._orphan_timeout_s = orphan_timeout_s
        self._max_finished = max_finished
        self._records: dict[str, Record] = {}
        self._finished: deque[tuple[str, Record]] = deque()

    def open(self, request: Request, *, now_s: float) -> None:
        """Start (or start over) the record of a request."""
        start = len(request.emitted) - 1
        self._records[request.request_id] = Record(
            request=request, term=request.term, polled_s=now_s, acked=start, dropped=start
        )

    def find(self, request_id: str) -> Record | None:
        """The record, or None if unknown."""
        return self._records.get(request_id)

    def record(self, request_id: str) -> Record:
        """The record.

        Raises:
            UnknownRequestError: never submitted here, or no longer kept.
        """
        found = self._records.get(request_id)
        if found is None:
            raise UnknownRequestError(
                f"request {request_id} is not known to this stack",
                remedy="resubmit it with the tokens already emitted and a higher term",
                request_id=request_id,
            )
        return found

    def fence(self, request_id: str, term: int) -> Record:
        """The record, with its term raised to `term`.

        Raises:
            UnknownRequestError: as in `record`.
            FencedError: a higher term has been seen.
        """
        record = self.record(request_id)
        record.term = refuse_lower_term(
            seen=record.term, offered=term, who=f"a reader of request {request_id}"
        )
        return record

    def append(self, request_id: str, event: TokenEvent, *, now_s: float) -> bool:
        """Add an event; returns False if the unread ones exceed the budget (cancel it)."""
        record = self._records[request_id]
        record.events.append(event)
        if event.finish is not None:
            record.finished_s = now_s
            self._finished.append((request_id, record))
            return True
        while len(record.events) > self._event_budget and (
            record.events[0].position <= record.acked
        ):
            record.dropped = record.events.popleft().position
        return len(record.events) <= self._event_budget

    def read(self, request_id: str, *, after: int, term: int, now_s: float) -> list[TokenEvent]:
        """Events with a position above `after`, in order; O(events returned).

        Raises:
            UnknownRequestError: unknown id, or the events right after `after` are gone.
            FencedError: a higher term has been seen.
        """
        record = self.fence(request_id, term)
        record.polled_s = now_s
        if after < record.dropped:
            raise UnknownRequestError(
                f"events {after + 1} to {record.dropped} of request {request_id} are not kept",
                remedy="resubmit it with the tokens already emitted and a higher term",
                request_id=request_id,
                first_kept=record.dropped + 1,
            )
        record.acked = max(record.acked, after)
        fresh: list[TokenEvent] = []
        for event in reversed(record.events):
            if event.position <= after:
                break
            fresh.append(event)
        fresh.reverse()
        return fresh

    def expire(self, *, now_s: float) -> list[str]:
        """Forget finished requests past retention; returns the ids of open orphans."""
        while self._finished:
            request_id, record = self._finished[0]
            finished_s = record.finished_s if record.finished_s is not None else now_s
            kept = now_s - finished_s < self._finished_retention_s
            if kept and len(self._finished) <= self._max_finished:
                break
            self._finished.popleft()
            # A request submitted anew under the same id has a record of its own.
            if self._records.get(request_id) is record:
                del self._records[request_id]
        return [
            request_id
            for request_id, record in self._records.items()
            if record.finished_s is None and now_s - record.polled_s >= self._orphan_timeout_s
        ]

    def __len__(self) -> int:
        return len(self._records)
