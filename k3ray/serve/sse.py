"""Server-sent events: framing, and a response that notices clients that leave or stall.

The response sends itself: it watches for the disconnect while it writes, and gives every write a
deadline, because the front end's own detection can be turned off by a client's header.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# One newline: stock clients keep the last event id and take any blank line after it for an event.
KEEP_ALIVE = b": waiting\n"

_log = logging.getLogger(__name__)


def frame(data: Mapping[str, Any] | str, *, event_id: str) -> bytes:
    """One event; JSON is ASCII on one line, so that no data can break the framing."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"id: {event_id}\ndata: {text}\n\n".encode("ascii")


class EventStream(Response):
    """Streams frames until they end, the client leaves, or a write takes longer than `stall_s`.

    Args:
        frames: The body; closed whatever happens.
        stall_s: Longest time that one write may take.
        on_end: Called once at the end, in every case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        *,
        stall_s: float,
        on_end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._frames = frames
        self._stall_s = stall_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        tasks: list[asyncio.Task[None]] = []
        try:
            tasks.append(asyncio.create_task(self._send_all(send)))
            tasks.append(asyncio.create_task(wait_disconnect(receive)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._on_end()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(results[0], TimeoutError):
            _log.warning("event=stream.stalled stall_s=%s", self._stall_s)
        elif isinstance(results[0], Exception):
            raise results[0]

    async def _send_all(self, send: Send) -> None:
        await self._send(
            send,
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            },
        )
        async for chunk in self._frames:
            await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._stall_s):
            await send(message)


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: asyncio.Task[Any]) -> bool:
    """Wait for `work`; on a disconnect cancel it and return False."""
    gone = asyncio.create_task(wait_disconnect(receive))
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        for task in (gone, work):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
