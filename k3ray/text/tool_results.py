"""Tool results in the order of the calls they answer.

Clients send results in any order and refer to calls by opaque ids; XTML numbers them. A run of
consecutive results is matched against the calls of the last assistant message before it. If every
result matches, the run is sorted into call order and the calls name the tools; if not, it stays as
it came, and a result without a name takes the name of the call at its own number.
Source: `encoding_k3` of the release.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from k3ray.errors import BadRequestError
from k3ray.text.chat import ChatMessage, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMessage:
    """A message where it is written; `tool` and `index` (from 1) for tool results only.

    Args:
        place: Number of the message as the client sent it, from 1.
    """

    message: ChatMessage
    place: int
    tool: str = ""
    index: int = 0


def in_call_order(messages: Sequence[ChatMessage]) -> Iterator[TurnMessage]:
    """The messages as they are written.

    Raises:
        BadRequestError: a tool result whose tool cannot be told.
    """
    calls: tuple[ToolCall, ...] = ()
    index = 0
    placed = list(enumerate(messages, start=1))
    for is_result, run in groupby(placed, key=lambda item: item[1].role == "tool"):
        if is_result:
            for place, message, tool in _resolved(list(run), calls):
                index += 1
                named = tool or _tool_by_place(place, index, calls)
                yield TurnMessage(message=message, place=place, tool=named, index=index)
            continue
        for place, message in run:
            if message.role == "assistant":
                calls, index = message.tool_calls, 0
            yield TurnMessage(message=message, place=place)


def _resolved(
    run: list[tuple[int, ChatMessage]], calls: tuple[ToolCall, ...]
) -> list[tuple[int, ChatMessage, str | None]]:
    """(place, message, tool), sorted if every result answers a call."""
    positions: dict[str | None, int] = {}
    for position, call in enumerate(calls):
        if call.call_id is not None:
            positions.setdefault(call.call_id, position)  # the first of equal ids holds
    if not all(message.answers in positions for _, message in run):
        return [(place, message, message.tool) for place, message in run]
    ordered = sorted(run, key=lambda item: positions[item[1].answers])  # stable
    return [(place, each, calls[positions[each.answers]].tool) for place, each in ordered]


def _tool_by_place(place: int, index: int, calls: tuple[ToolCall, ...]) -> str:
    if index <= len(calls):
        return calls[index - 1].tool
    raise BadRequestError(
        f"messages[{place - 1}]: this tool result answers no call and names no tool",
        remedy="send the tool_call_id of a call in the assistant message before it, or a name",
        param=f"messages[{place - 1}].tool_call_id",
    )
