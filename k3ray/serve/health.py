"""Health and status: what the controller says, asked at most once per `max_age_s`.

Ready means: the controller answered in time and a stack can be chosen. Many pages and probes share
one question; nobody waits longer than `limit_s`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from k3ray.clock import Clock, Deadline, monotonic
from k3ray.errors import K3RayError
from k3ray.serve.router import StackRouter


class Health:
    """Shared, short-lived view of the supernode."""

    def __init__(
        self,
        router: StackRouter,
        *,
        limit_s: float = 3.0,
        max_age_s: float = 0.5,
        clock: Clock = monotonic,
    ) -> None:
        self._router = router
        self._limit_s = limit_s
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: tuple[float, dict[str, Any]] | None = None

    async def check(self) -> tuple[bool, dict[str, Any]]:
        """(ready, document)."""
        try:
            document = await self.status()
            async with asyncio.timeout(self._limit_s):
                stack = await self._router.choose(affinity=0, avoid=frozenset())
        except (K3RayError, TimeoutError) as error:
            return False, {"status": "unavailable", "reason": str(error)}
        if stack is None:
            return False, {"status": "unavailable", "reason": "no attention stack is ready"}
        return True, {
            "status": "ok",
            "supernode": document.get("state"),
            "plan_version": document.get("plan_version"),
            "stack": str(stack),
        }

    async def status(self) -> dict[str, Any]:
        """The supernode's status document, at most `max_age_s` old.

        Raises:
            DeadlineError: the controller did not answer in time.
            K3RayError: it could not be reached.
        """
        async with self._lock:
            if self._known is not None and self._clock() - self._known[0] < self._max_age_s:
                return self._known[1]
            deadline = Deadline.after(self._limit_s, operation="status", peer="controller")
            try:
                async with asyncio.timeout(self._limit_s):
                    document = await self._router.status()
            except TimeoutError:
                raise deadline.error() from None
            self._known = (self._clock(), document)
            return document
