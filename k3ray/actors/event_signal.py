"""`EventSignal`: "there may be new events", from any thread to the coroutines of one loop.

A coroutine takes a ticket, looks, and waits on the ticket if it saw nothing; every `notify` after
the ticket was taken wakes it. Notifications that come before the loop runs are merged.
"""

from __future__ import annotations

import asyncio


class EventSignal:
    """Belongs to `loop`; only `notify` may be called from elsewhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self._pending = False

    def notify(self) -> None:
        """Wake all waiters soon; thread-safe, never blocks."""
        if not self._pending:
            self._pending = True
            self._loop.call_soon_threadsafe(self._fire)

    def ticket(self) -> asyncio.Event:
        """Set at the next notification; take it before looking."""
        return self._event

    def _fire(self) -> None:
        self._pending = False
        fired, self._event = self._event, asyncio.Event()
        fired.set()
