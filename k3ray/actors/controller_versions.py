"""`VersionMethods`: the part of the controller that people and clients ask about weight versions.

A publish and a return to an older version end the same way: the version is committed, every holder
loads it, then it is the latest; until then the old one serves.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from k3ray.actors.controller_loop import ControlLoop
from k3ray.clock import Deadline, monotonic
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import WaitForPins
from k3ray.control.ledger import Ledger
from k3ray.control.supervisor import Supervisor
from k3ray.control.versions import admit_publish, publish_refused
from k3ray.errors import StaleVersionError, StoreError
from k3ray.ids import Incarnation
from k3ray.weights.manifest import EntryKind
from k3ray.weights.store import WeightStore
from k3ray.weights.version import WeightVersion


class VersionMethods(ABC):
    """Mixed into the controller, which sets the attributes."""

    _spec: SupernodeSpec
    _model_digest: str
    _store: WeightStore
    _ledger: Ledger
    _supervisor: Supervisor

    async def latest_version(self, line: str | None = None) -> str:
        """Latest live version of a line (default: the supernode's).

        Raises:
            StaleVersionError: it has none.
        """
        return self._supervisor.versions.latest(line or self._spec.line)

    async def pin(
        self, version: str | None, request_id: str, holder: Incarnation | None = None
    ) -> str:
        """Keep a version (None: the latest) alive for a request; returns the version. If its holder
        ends, the pin ends `orphan_timeout_s` later.

        Raises:
            StaleVersionError: it is not live.
        """
        chosen = version or self._supervisor.versions.latest(self._spec.line)
        self._supervisor.versions.pin(chosen, request_id, monotonic(), holder=holder)
        return chosen

    async def unpin(self, request_id: str) -> None:
        """The request is over; unknown ones are fine."""
        self._supervisor.versions.unpin(request_id)
        self._running.notify()

    async def weight_info(self) -> dict[str, Any]:
        """The line's live versions (oldest step first) and what the store has of it."""
        line = self._spec.line
        stored = await asyncio.to_thread(self._store.entries, line, EntryKind.VERSION)
        damaged = await asyncio.to_thread(self._store.damaged, line)
        view = self._running.view()
        live = {v.version: v for v in sorted(view.versions, key=lambda v: v.step)}
        return {
            "line": line,
            "version": self._ledger.state.latest.get(line, ""),
            "max_live_versions": self._spec.max_live_versions,
            "live": [
                {
                    "version": v.version,
                    "step": v.step,
                    "state": "latest" if v.latest else "pinned" if v.active else "loading",
                    "pins": sum(pin.version == v.version for pin in view.pins),
                    "holders": sorted(
                        a.actor for a in view.actors.values() if v.version in a.versions
                    ),
                }
                for v in live.values()
            ],
            "stored": [
                {
                    "version": str(entry.version),
                    "step": entry.version.step,
                    "created_unix_s": entry.manifest.created_unix_s,
                    "size_bytes": sum(shard.size_bytes for shard in entry.manifest.shards),
                    "live": str(entry.version) in live,
                }
                for entry in stored
            ],
            "damaged": damaged,
        }

    async def use_version(self, version: str) -> str:
        """Make a version that the store has the latest of the supernode's line: an older one (a
        roll-back) or a newer one. Returns the latest version before, when the change is complete;
        open requests keep theirs. The line's next publish becomes the latest as ever.

        Raises:
            StoreError: no such version of this line and model is stored whole.
            CapacityError: pinned versions fill the bound; names the pins.
            DeadlineError: another version was being activated all the while.
            StaleVersionError: a holder did not take it in time; the old version serves on.
        """
        wanted = WeightVersion.parse(version)
        if wanted.line != self._spec.line:
            raise StoreError(
                f"{version} is of line {wanted.line!r}, {self._spec.line!r} is served",
                remedy="name a version of that line (`k3ray versions`)", version=version,
            )  # fmt: skip
        entry = await asyncio.to_thread(self._store.open, wanted.line, wanted)
        entry.require_model(self._model_digest)
        before = self._supervisor.versions.latest(wanted.line)
        if before == version:
            return before
        if not self._supervisor.versions.is_active(version):
            await self._until_admitted(wanted.line, operation="use_version")
            self._supervisor.versions.commit(entry.version, monotonic(), restored=True)
            self._running.notify()
            await self._until_active(version)
        if self._supervisor.versions.latest(wanted.line) != version:
            self._supervisor.versions.activate(version)
            self._running.notify()
        return before

    async def _until_admitted(self, line: str, *, operation: str) -> None:
        """Wait (`prepare_s`) until one more version may be activated.

        Raises:
            CapacityError: it may not yet; names the pins and their ages.
        """
        limit_s = self._spec.deadlines.prepare_s
        deadline = Deadline.after(limit_s, operation=operation, peer=line)

        def waits() -> WaitForPins | None:
            return admit_publish(self._spec, self._running.view(), line, monotonic())

        wait = waits()
        if wait is not None:
            self._running.record(wait)
        if not await self._running.until(lambda: waits() is None, deadline):
            wait = waits()
            if wait is not None:
                raise publish_refused(wait, waited_s=limit_s, now_s=monotonic())

    async def _until_active(self, version: str) -> None:
        """Wait (2 `rebuild_s`) until every holder has a committed version.

        Raises:
            StaleVersionError: a holder did not take it in time; the old version serves on.
        """
        limit_s = 2 * self._spec.deadlines.rebuild_s
        deadline = Deadline.after(limit_s, operation="activate", peer=version)

        def settled() -> bool:
            facts = self._ledger.state.versions.get(version)
            return facts is None or facts.active

        if not await self._running.until(settled, deadline):
            raise deadline.error("see the last decisions: k3ray status")
        if not self._supervisor.versions.is_active(version):
            raise StaleVersionError(
                f"version {version} was not activated, the old one serves on",
                remedy="see the last decisions (k3ray status) and try again",
                version=version,
            )

    @property
    @abstractmethod
    def _running(self) -> ControlLoop:
        """The control loop."""
