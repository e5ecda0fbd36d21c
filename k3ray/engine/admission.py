"""What may enter the engine: a well-formed request, and a repeat told from a clash.

Checks run before anything changes, so that a refused request leaves no trace.
"""

from __future__ import annotations

from dataclasses import replace

from k3ray.engine.event_log import Record
from k3ray.engine.request import FinishReason, Request
from k3ray.engine.sampling import check_sampling
from k3ray.engine.sequence import Sequence
from k3ray.errors import BadRequestError


def check_request(request: Request, *, vocab_size: int) -> None:
    """Check the fields of a request.

    Raises:
        BadRequestError: empty prompt, a token outside the vocabulary, a sampling field or the
            choice out of range.
    """
    if not request.prompt:
        raise BadRequestError(
            "the prompt has no tokens", remedy="send at least one token", param="prompt"
        )
    for name, tokens in (("prompt", request.prompt), ("emitted", request.emitted)):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise BadRequestError(
                f"{name} has a token outside [0, {vocab_size})",
                remedy="tokenise with this model's tokenizer",
                param=name,
            )
    if request.choice < 0:
        raise BadRequestError(
            f"choice is {request.choice}", remedy="count choices from 0", param="choice"
        )
    check_sampling(request.sampling, vocab_size=vocab_size)


def is_repeat(request: Request, record: Record, sequence: Sequence | None) -> bool:
    """Whether a request with a known id attaches to what this stack has of it.

    False means: start over with its `emitted` tokens, because the stack's own attempt was cut
    off (aborted, failed) or is behind what the client already has.

    Raises:
        BadRequestError: the id belongs to a different request.
    """
    known = record.request
    if replace(request, emitted=(), term=0) != replace(known, emitted=(), term=0):
        raise BadRequestError(
            f"request id {request.request_id} is in use by a different request",
            remedy="use a fresh id for every request",
            param="request_id",
        )
    if sequence is not None:
        return record.dropped < len(request.emitted) <= sequence.position
    last = record.events[-1]
    if last.finish in (FinishReason.ABORTED, FinishReason.ERROR):
        return False
    return record.dropped < len(request.emitted) <= last.position + 1
