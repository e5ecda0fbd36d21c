"""A stopped controller is ended: Ray starts the next life of a dead actor, not of a stopped one.

Every ingress looks at the controller's process, straight from the kernel, when both live on one
node. The rule is the controller's own for its actors: stopped for longer than a hop may take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from k3ray.actors.controller_cluster import is_alive, is_stopped, kill_process, own_node
from k3ray.clock import monotonic
from k3ray.control.supervisor import ProcessFacts
from k3ray.errors import K3RayError

LOOK_EVERY_S = 0.25
_log = logging.getLogger(__name__)


async def watch_controller(
    find: Callable[[], Awaitable[ProcessFacts]], *, stopped_s: float
) -> None:
    """Watch the controller; runs until cancelled.

    Args:
        find: Asks the controller for its process.
        stopped_s: How long it may be stopped.
    """
    facts: ProcessFacts | None = None
    stopped_since_s: float | None = None
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if facts is None or not is_alive(facts):
            stopped_since_s = None
            try:
                facts = await find()
            except K3RayError as error:
                _log.info("event=controller_watch.unknown error=%s", error.code)
                continue
        if facts.node != own_node() or not is_stopped(facts):
            stopped_since_s = None
            continue
        now_s = monotonic()
        stopped_since_s = now_s if stopped_since_s is None else stopped_since_s
        if now_s - stopped_since_s >= stopped_s:
            _log.error("event=controller.stopped pid=%d ended_after_s=%.1f", facts.pid, stopped_s)
            kill_process(facts)
            facts = None
