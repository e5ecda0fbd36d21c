"""A reader's view of a run: the frames of a stream, or the whole answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from k3ray.serve.api_errors import error_reply
from k3ray.serve.api_responses import stream_chunk, usage_chunk, usage_of, whole_answer
from k3ray.serve.pieces import EventId
from k3ray.serve.service import Answer, body_mark, wrong_event
from k3ray.serve.sse import KEEP_ALIVE, frame

_log = logging.getLogger(__name__)


async def stream_frames(answer: Answer, *, keep_alive_s: float) -> AsyncIterator[bytes]:
    """SSE frames after what the client already has; an error becomes the last event."""
    run, envelope = answer.run, answer.envelope
    counts = list(answer.counts)
    offsets = [
        sum(len(piece.content) for piece in choice.pieces[:count])
        for choice, count in zip(run.choices, counts, strict=True)
    ]
    position = EventId(
        body=body_mark(answer.entry.digest), seed=answer.entry.seed, version=envelope.version,
        counts=tuple(counts), usage_sent=answer.usage_sent,
    )  # fmt: skip
    try:
        async for item in run.read(counts, idle_s=keep_alive_s):
            if item is None:
                yield KEEP_ALIVE
                continue
            index, piece = item
            counts[index] += 1
            position = replace(position, counts=tuple(counts))
            chunk = stream_chunk(envelope, index, piece, offset=offsets[index])
            offsets[index] += len(piece.content)
            yield frame(chunk, event_id=str(position))
    except Exception as error:
        _log.warning("event=stream.failed run=%s error=%s", run.run_id, type(error).__name__)
        yield frame(dict(error_reply(error).body), event_id=str(position))
        return
    if any(count > len(c.pieces) for count, c in zip(counts, run.choices, strict=True)):
        refusal = wrong_event("past the end of the answer")
        yield frame(dict(error_reply(refusal).body), event_id=str(position))
        return
    position = replace(position, usage_sent=True)
    if envelope.call.include_usage and not answer.usage_sent:
        yield frame(usage_chunk(envelope, _usage(answer)), event_id=str(position))
    yield frame("[DONE]", event_id=str(position))


async def collect(answer: Answer, *, idle_s: float) -> dict[str, Any]:
    """The whole answer.

    Raises:
        K3RayError: the run failed.
    """
    async for _ in answer.run.read((0,) * len(answer.run.choices), idle_s=idle_s):
        pass
    pieces = [choice.pieces for choice in answer.run.choices]
    return whole_answer(answer.envelope, pieces, _usage(answer))


def _usage(answer: Answer) -> dict[str, Any]:
    return usage_of(
        answer.entry.num_prompt_tokens, [choice.pieces for choice in answer.run.choices]
    )
