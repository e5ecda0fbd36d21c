"""`MemoryAuthority`: a `LineAuthority` without a controller, and a whole line in one process.

Steps, checkpoints and versions are kept in lists, so that tests can read the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from k3ray.train.authority import Json, StepRecord
from k3ray.weights.manifest import EntryKind, Meta, ShardInfo
from k3ray.weights.store import StagedEntry, WeightStore


class MemoryAuthority:
    """See the module; `on_commit` runs before a step is recorded and may raise."""

    def __init__(self, store: WeightStore, line: str = "main") -> None:
        self._store = store
        self._line = line
        self._attempts = 0
        self.steps: list[StepRecord] = []
        self.checkpoints: list[str] = []
        self.versions: list[str] = []
        self.reports: list[Mapping[str, Json]] = []
        self.on_commit: Callable[[StepRecord], Any] = lambda record: None
        self.after_commit: Callable[[StepRecord], Any] = lambda record: None

    def begin_attempt(self, step: int) -> int:
        """See `LineAuthority`."""
        self._attempts += 1
        return self._attempts

    def commit_step(self, record: StepRecord) -> None:
        """See `LineAuthority`."""
        self.on_commit(record)
        self.steps.append(record)
        self.after_commit(record)

    def begin_checkpoint(self, step: int) -> StagedEntry:
        """See `LineAuthority`."""
        return self._store.stage(self._line, EntryKind.CHECKPOINT, step)

    def commit_checkpoint(
        self, staged: StagedEntry, shards: Sequence[ShardInfo], meta: Meta
    ) -> str:
        """See `LineAuthority`."""
        version = self._store.commit(staged, shards, meta)
        entry = self._store.open(self._line, version, EntryKind.CHECKPOINT).name
        self.checkpoints.append(entry)
        return entry

    def begin_publish(self, step: int) -> StagedEntry:
        """See `LineAuthority`."""
        return self._store.stage(self._line, EntryKind.VERSION, step)

    def commit_publish(self, staged: StagedEntry, shards: Sequence[ShardInfo], meta: Meta) -> str:
        """See `LineAuthority`."""
        version = str(self._store.commit(staged, shards, meta))
        self.versions.append(version)
        return version

    def report(self, metrics: Mapping[str, Json]) -> None:
        """See `LineAuthority`."""
        self.reports.append(metrics)
