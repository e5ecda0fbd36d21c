"""Awaiting the engine's score jobs on an event loop, all of a call or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from k3ray.clock import Deadline
from k3ray.engine.engine import Engine
from k3ray.engine.scoring import LogProbs


async def score_all(
    engine: Engine, version: str, sequences: Sequence[tuple[int, ...]], deadline: Deadline
) -> list[LogProbs]:
    """Score every sequence; if one is refused, fails or is late, the others are dropped.

    Raises:
        DeadlineError: not done in time.
        K3RayError: see `Engine.score`.
    """
    futures = []
    try:
        for tokens in sequences:
            futures.append(engine.score(version, tokens))
        async with asyncio.timeout(deadline.left_s()):
            return [await asyncio.wrap_future(future) for future in futures]
    except TimeoutError:
        raise deadline.error("score fewer tokens per call") from None
    finally:
        for future in futures:
            future.cancel()
