"""`VersionLedger`: live weight versions, which of them is the latest, and who pins which. No Ray.

A version is committed (whole in the store), activated (every holder has it: it is its line's
latest), replaced, and retired once no request pins it. A retired version that the store still has
may be committed again: that is how a line goes back.
"""

from __future__ import annotations

from dataclasses import replace

from k3ray.control.ledger import Ledger
from k3ray.control.records import VersionActivated, VersionCommitted, VersionRetired
from k3ray.control.view import PinView, VersionView
from k3ray.errors import StaleVersionError
from k3ray.ids import Incarnation
from k3ray.weights.version import WeightVersion


class VersionLedger:
    """See the module. `now_s` arguments are monotonic seconds; pins do not outlive a controller."""

    def __init__(self, ledger: Ledger, *, now_s: float) -> None:
        self._ledger = ledger
        self._pins: dict[str, PinView] = {}
        self._since: dict[str, float] = dict.fromkeys(ledger.state.versions, now_s)

    def commit(self, version: WeightVersion, now_s: float, *, restored: bool = False) -> None:
        """The version is whole in the store; holders will be asked to load it. Idempotent.

        Args:
            restored: It was a version before: the store keeps it even if nobody can load it.
        """
        text = str(version)
        if text in self._ledger.state.versions:
            return
        self._ledger.write(
            VersionCommitted(
                version=text, line=version.line, step=version.step, restored=restored
            )
        )  # fmt: skip
        self._since[text] = now_s

    def activate(self, version: str) -> None:
        """The version is its line's latest from here on; all holders have it."""
        self._ledger.write(VersionActivated(version=version))

    def retire(self, version: str, reason: str) -> None:
        """The version is no longer live."""
        self._ledger.write(VersionRetired(version=version, reason=reason))
        self._since.pop(version, None)

    def latest(self, line: str) -> str:
        """Latest active version of `line`.

        Raises:
            StaleVersionError: the line has none (yet).
        """
        version = self._ledger.state.latest.get(line)
        if version is None:
            raise StaleVersionError(
                f"line {line!r} has no live version",
                remedy="wait until the supernode is ready (k3ray status)",
                line=line,
            )
        return version

    def is_active(self, version: str) -> bool:
        """Whether every holder has it."""
        facts = self._ledger.state.versions.get(version)
        return facts is not None and facts.active

    def pin(
        self, version: str, request_id: str, now_s: float, *, holder: Incarnation | None = None
    ) -> None:
        """Keep `version` alive for an open request; repeating it keeps the first time and takes
        the new holder.

        Raises:
            StaleVersionError: the version is not live.
        """
        if not self.is_active(version):
            raise StaleVersionError(
                f"version {version} is not live",
                remedy="start a new request with the latest version",
                version=version,
                live=tuple(self._ledger.state.versions),
            )
        known = self._pins.get(request_id)
        since_s = now_s if known is None or known.version != version else known.since_s
        self._pins[request_id] = PinView(
            request_id=request_id, version=version, since_s=since_s, holder=holder
        )

    def orphan(self, holder: Incarnation, now_s: float) -> None:
        """An ingress is gone; its requests may come back by another one for a while."""
        for pin in self._pins.values():
            if pin.holder == holder and pin.orphan_since_s is None:
                self._pins[pin.request_id] = replace(pin, orphan_since_s=now_s)

    def unpin(self, request_id: str) -> None:
        """The request is over; idempotent."""
        self._pins.pop(request_id, None)

    def pins(self) -> tuple[PinView, ...]:
        """Pins of open requests."""
        return tuple(self._pins.values())

    def views(self, line: str) -> tuple[VersionView, ...]:
        """Live versions of a line, as `decide` sees them."""
        state = self._ledger.state
        return tuple(
            VersionView(
                version=v.version, line=v.line, step=v.step, active=v.active,
                latest=state.latest.get(v.line) == v.version, since_s=self._since[v.version],
            )
            for v in state.versions.values()
            if v.line == line
        )  # fmt: skip
