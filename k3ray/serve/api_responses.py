"""OpenAI's response objects from pieces: whole answers, stream chunks, usage, model list.

Field order follows OpenAI's documentation. A stream's chunks concatenate to the whole answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3ray.serve.api import Call, CallKind
from k3ray.serve.pieces import Alternative, Piece, SentToken
from k3ray.text.xtml_parser import CallText


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all objects of one answer share: id, creation time (Unix s), call, weight version."""

    answer_id: str
    created_s: int
    call: Call
    version: str

    def fields(self, kind: str) -> dict[str, Any]:
        """The common head of an object."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.call.model,
            "system_fingerprint": self.version,
        }


def stream_chunk(envelope: Envelope, choice: int, piece: Piece, *, offset: int) -> dict[str, Any]:
    """One SSE object.

    Args:
        offset: Characters of text that the choice had before this piece (`text_offset`).
    """
    call = envelope.call
    if call.kind is CallKind.CHAT:
        delta = _delta(envelope, choice, piece)
        body = {"index": choice, "delta": delta, "finish_reason": piece.finish}
        kind = "chat.completion.chunk"
    else:
        body = {"index": choice, "text": piece.content, "finish_reason": piece.finish}
        kind = "text_completion"
    body["logprobs"] = _logprobs(call, piece.tokens, offset)
    if call.return_token_ids:
        body["token_ids"] = [sent.token for sent in piece.tokens]
    chunk = {**envelope.fields(kind), "choices": [body]}
    return {**chunk, "usage": None} if call.include_usage else chunk


def usage_chunk(envelope: Envelope, usage: Mapping[str, Any]) -> dict[str, Any]:
    """The last object of a stream with `include_usage`."""
    chat = envelope.call.kind is CallKind.CHAT
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {**envelope.fields(kind), "choices": [], "usage": dict(usage)}


def whole_answer(
    envelope: Envelope, choices: Sequence[Sequence[Piece]], usage: Mapping[str, Any]
) -> dict[str, Any]:
    """The answer of a request without `stream`."""
    chat = envelope.call.kind is CallKind.CHAT
    return {
        **envelope.fields("chat.completion" if chat else "text_completion"),
        "choices": [
            _chat_choice(envelope, i, pieces) if chat else _text_choice(envelope.call, i, pieces)
            for i, pieces in enumerate(choices)
        ],
        "usage": dict(usage),
    }


def usage_of(num_prompt_tokens: int, choices: Iterable[Sequence[Piece]]) -> dict[str, Any]:
    """Token counts; every generated token counts, end tokens too."""
    completion = sum(len(piece.tokens) for pieces in choices for piece in pieces)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
    }


def model_object(name: str, *, created_s: int, context: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "k3ray",
        "max_model_len": context,
    }


def _call_id(envelope: Envelope, choice: int, index: int) -> str:
    """Id of a tool call: unique to the answer, the same whenever it is read."""
    place = f"{envelope.answer_id}/{choice}/{index}"
    return f"call_{hashlib.blake2b(place.encode(), digest_size=12).hexdigest()}"


def _delta(envelope: Envelope, choice: int, piece: Piece) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if piece.opens:
        delta["role"] = "assistant"
    if piece.reasoning:
        delta["reasoning_content"] = piece.reasoning
    if piece.content or piece.opens:
        delta["content"] = piece.content
    if piece.calls:
        delta["tool_calls"] = [_call_delta(envelope, choice, part) for part in piece.calls]
    return delta


def _call_delta(envelope: Envelope, choice: int, part: CallText) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.tool is None:
        return {"index": part.index, "function": function}
    call_id = _call_id(envelope, choice, part.index)
    head = {"index": part.index, "id": call_id, "type": "function"}
    return {**head, "function": {"name": part.tool, **function}}


def _tool_calls(envelope: Envelope, choice: int, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The calls of a whole answer: the deltas, put together."""
    calls: list[dict[str, Any]] = []
    for part in (part for piece in pieces for part in piece.calls):
        if part.tool is not None:
            call_id = _call_id(envelope, choice, part.index)
            call = {"name": part.tool, "arguments": ""}
            calls.append({"id": call_id, "type": "function", "function": call})
        calls[part.index]["function"]["arguments"] += part.arguments
    return calls


def _chat_choice(envelope: Envelope, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    content = "".join(piece.content for piece in pieces)
    reasoning = "".join(piece.reasoning for piece in pieces)
    calls = _tool_calls(envelope, index, pieces)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return _choice(envelope.call, index, pieces, message=message)


def _text_choice(call: Call, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    return _choice(call, index, pieces, text="".join(piece.content for piece in pieces))


def _choice(call: Call, index: int, pieces: Sequence[Piece], **body: Any) -> dict[str, Any]:
    tokens = [sent for piece in pieces for sent in piece.tokens]
    choice: dict[str, Any] = {"index": index, **body}
    choice["logprobs"] = _logprobs(call, tokens, 0)
    choice["finish_reason"] = pieces[-1].finish if pieces else None
    if call.return_token_ids:
        choice["token_ids"] = [sent.token for sent in tokens]
    return choice


def _logprobs(call: Call, tokens: Sequence[SentToken], offset: int) -> dict[str, Any] | None:
    if not call.logprobs or not tokens:
        return None
    if call.kind is CallKind.CHAT:
        return {
            "content": [
                {**_entry(sent), "top_logprobs": [_entry(other) for other in sent.top]}
                for sent in tokens
            ],
            "refusal": None,
        }
    offsets: list[int] = []
    for sent in tokens:
        offsets.append(offset)
        offset += len(sent.text)
    return {
        "tokens": [sent.text for sent in tokens],
        "token_logprobs": [sent.logprob for sent in tokens],
        "top_logprobs": [_top_by_text(sent) for sent in tokens],
        "text_offset": offsets,
    }


def _entry(token: SentToken | Alternative) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}


def _top_by_text(sent: SentToken) -> dict[str, float]:
    """The alternatives and, as OpenAI does, the token itself."""
    top = {other.text: other.logprob for other in sent.top}
    top.setdefault(sent.text, sent.logprob)
    return top
