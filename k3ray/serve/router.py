"""`StackRouter`: all that the ingress needs of the supernode, without Ray.

Implementations translate the death of a peer to `PeerLostError` and a missing answer to
`DeadlineError`; whatever the stack or controller raised comes through as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from k3ray.engine.request import Request, TokenEvent
from k3ray.ids import Incarnation


class StackRouter(Protocol):
    """Stacks and weight versions as the ingress sees them."""

    async def pin(self, request_id: str, version: str | None) -> str:
        """Pin `version` (None: the line's latest) for a request; returns the version.

        Raises:
            StaleVersionError: `version` is not live.
            K3RayError: no controller answered in time.
        """
        ...

    async def unpin(self, request_id: str) -> None:
        """Give the pin back; a request without one is fine."""
        ...

    async def choose(self, *, affinity: int, avoid: frozenset[Incarnation]) -> Incarnation | None:
        """A ready stack, by prefix affinity and load; None if there is none but avoided ones.

        Args:
            affinity: Hash of the prompt's prefix; equal prefixes prefer the same stack.
            avoid: Lives of stacks that were seen dead or stuck.
        """
        ...

    async def submit(self, stack: Incarnation, request: Request) -> None:
        """Hand a request to a stack.

        Raises:
            CapacityError: its queue is full.
            PeerLostError, DeadlineError: the stack is gone or stuck.
        """
        ...

    async def poll(
        self, stack: Incarnation, request_id: str, *, after: int, term: int, wait_s: float
    ) -> Sequence[TokenEvent]:
        """Events after position `after`; waits at most `wait_s` for the first.

        Raises:
            UnknownRequestError: the stack does not know the request (any more).
            FencedError: it has seen a higher term of the request.
            PeerLostError, DeadlineError: the stack is gone or stuck.
        """
        ...

    async def cancel(self, stack: Incarnation, request_id: str) -> None:
        """Stop a request; best effort, never raises for a lost stack."""
        ...

    async def report_lost(self, stack: Incarnation) -> None:
        """Tell the controller of a dead or stuck stack; best effort."""
        ...

    async def scale(self, *, groups: int) -> dict[str, Any]:
        """Have another number of expert groups; returns at once.

        Raises:
            ConfigError, PlacementError, PlanError: there cannot be so many.
            ScalingError: another change is under way.
        """
        ...

    async def weight_info(self) -> dict[str, Any]:
        """The line's weight versions: live ones, stored ones."""
        ...

    async def use_version(self, version: str) -> str:
        """Make a stored version the latest; returns the one before when all holders have it.

        Raises:
            StoreError: no such version is stored whole.
            CapacityError: pinned versions fill the bound.
            StaleVersionError: a holder did not take it; the old version serves on.
        """
        ...

    async def status(self) -> dict[str, Any]:
        """The supernode's status document."""
        ...
