"""`TrainingMethods`: the part of the controller that trainers call: leases, steps, publishes.

Every method takes the lease's id and refuses one that is over. A publish is staged, written by its
holders, committed, loaded by everybody, and only then the latest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from k3ray.actors.controller_versions import VersionMethods
from k3ray.clock import Deadline, monotonic
from k3ray.control.leases import Lease, LeaseRequest
from k3ray.control.loss_history import with_history
from k3ray.control.training import TrainingLedger
from k3ray.weights.manifest import EntryKind, Meta, ShardInfo
from k3ray.weights.store import StagedEntry

NUM_CHECKPOINTS_KEPT = 2


class TrainingMethods(VersionMethods):
    """Mixed into the controller, which sets the attributes."""

    _training: TrainingLedger
    _metrics: dict[str, dict[str, Any]]

    async def acquire_lease(self, line: str, job: str, host: str, pid: int) -> Lease:
        """The training lease of `line`.

        Raises:
            LineBusyError: another job holds it (job, host, age).
        """
        request = LeaseRequest(line=line, job=job, host=host, pid=pid)
        return self._training.acquire(request, now_s=monotonic(), now_unix_s=time.time())

    async def renew_lease(self, lease_id: str) -> Lease:
        """Push the lease's deadline out.

        Raises:
            LeaseLostError: it is over.
        """
        return self._training.renew(lease_id, now_s=monotonic())

    async def release_lease(self, lease_id: str) -> None:
        """Give the line back; an unknown lease is fine."""
        self._training.end(lease_id, "released by its holder")

    async def begin_attempt(self, lease_id: str, line: str, step: int) -> int:
        """Open the next attempt at a step, once all experts have a live home.

        Raises:
            LeaseLostError: the caller does not hold the line.
            DeadlineError: a group was not rebuilt in time.
        """
        self._training.require(lease_id, line)
        deadline = Deadline.after(
            self._spec.deadlines.rebuild_s, operation="begin_attempt", peer="expert groups"
        )
        if not await self._running.until(self._supervisor.is_whole, deadline):
            raise deadline.error("see which group is missing: k3ray status")
        plan = self._supervisor.plan()
        version = plan.version if plan else 0
        return self._training.begin_attempt(lease_id, line, step, plan=version)

    async def commit_step(self, lease_id: str, record: Mapping[str, JsonValue]) -> None:
        """Commit the open attempt: fsynced when this returns. Idempotent.

        Raises:
            LeaseLostError, StepAbortedError, DataError: see `TrainingLedger.commit_step`.
        """
        self._training.commit_step(lease_id, record, alive=self._supervisor.group_terms())

    async def begin_publish(self, lease_id: str, line: str, step: int) -> StagedEntry:
        """Stage a version; waits (`prepare_s`) while an earlier publish is under way or pinned
        older versions fill the bound.

        Raises:
            LeaseLostError: the caller does not hold the line.
            CapacityError: pins did not end in time; names them and their ages.
        """
        self._training.require(lease_id, line)
        await self._until_admitted(line, operation="begin_publish")
        return self._store.stage(line, EntryKind.VERSION, step)

    async def commit_publish(
        self,
        lease_id: str,
        staged: StagedEntry,
        shards: Sequence[ShardInfo],
        meta: Meta | None = None,
    ) -> str:
        """Make the version exist, have every holder load it, and make it the latest.

        Returns the version's text when it is the latest.

        Raises:
            LeaseLostError: the caller does not hold the line.
            StoreError: shards are missing or the disk is full; nothing became visible.
            StaleVersionError: a holder did not take it in time; the old version serves on.
        """
        self._training.require(lease_id, staged.line)
        version = await asyncio.to_thread(
            self._store.commit, staged, shards, {**self._model_meta(), **(meta or {})}
        )
        text = str(version)
        self._supervisor.versions.commit(version, monotonic())
        self._running.notify()
        if staged.line != self._spec.line:
            return text  # nobody serves it: it exists, and that is all
        await self._until_active(text)
        return text

    async def begin_checkpoint(self, lease_id: str, line: str, step: int) -> StagedEntry:
        """Stage a checkpoint.

        Raises:
            LeaseLostError: the caller does not hold the line.
        """
        self._training.require(lease_id, line)
        return self._store.stage(line, EntryKind.CHECKPOINT, step)

    async def commit_checkpoint(
        self,
        lease_id: str,
        staged: StagedEntry,
        shards: Sequence[ShardInfo],
        meta: Meta | None = None,
    ) -> str:
        """Make the checkpoint exist; returns its entry's name. The last two are kept.

        Raises:
            LeaseLostError: the caller does not hold the line.
            StoreError: shards are missing or the disk is full; nothing became visible.
        """
        self._training.require(lease_id, staged.line)
        version = await asyncio.to_thread(
            self._store.commit, staged, shards, {**self._model_meta(), **(meta or {})}
        )
        entry = self._store.open(staged.line, version, EntryKind.CHECKPOINT).name
        self._training.commit_checkpoint(lease_id, staged.line, staged.step, entry)
        await asyncio.to_thread(self._drop_old_checkpoints, staged.line)
        return entry

    async def report_training(self, line: str, metrics: Mapping[str, JsonValue]) -> None:
        """Latest metrics of a line (step, loss, ...), for the status."""
        self._metrics[line] = with_history(self._metrics.get(line), metrics)

    def _model_meta(self) -> dict[str, str | int | float | bool | None]:
        return {"model": self._model_digest, "preset": self._spec.preset}

    def _drop_old_checkpoints(self, line: str) -> None:
        for entry in self._store.entries(line, EntryKind.CHECKPOINT)[:-NUM_CHECKPOINTS_KEPT]:
            self._store.delete(line, entry.name)
