"""`Ledger`: the journal and the state that follows from it, always in step.

`write` checks a record against the state first, then makes it durable, then moves the state: what
the journal refuses has not happened. One fsync per call, a few milliseconds.
"""

from __future__ import annotations

from k3ray.control.journal import Journal
from k3ray.control.records import Record
from k3ray.control.state import ControlState, apply, fold


class Ledger:
    """Facts of one controller term."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.state: ControlState = fold(journal.records)

    @property
    def term(self) -> int:
        """The controller's own term."""
        return self.journal.term

    def write(self, record: Record) -> None:
        """Record a fact.

        Raises:
            JournalError: it contradicts the state, or the disk failed; nothing changed.
            FencedError: a later controller has taken over.
        """
        after = apply(self.state, record)
        self.journal.append(record)
        self.state = after
