"""What one choice sends, as a list that only grows: `Piece`, and the event ids that count them.

The pieces of a choice are a pure function of its tokens, so a run that is computed again (another
stack, another ingress) makes the same list, and a count per choice is a position in the stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3ray.errors import BadRequestError
from k3ray.text.xtml_parser import CallText


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A token that could have come, with its natural log-probability."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SentToken:
    """A token that came: id, own text and bytes, log-probability, most likely alternatives."""

    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One step of one choice.

    Args:
        opens: First piece of a chat choice; it carries the role.
        content, reasoning: New text of the two channels.
        calls: What is new of tool calls.
        tokens: The tokens behind this piece, in order; all tokens appear in exactly one piece.
        finish: Why the choice ended, on its last piece.
    """

    opens: bool = False
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallText, ...] = ()
    tokens: tuple[SentToken, ...] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """The `id` of an SSE event: all that is needed to go on after it, at any ingress.

    Args:
        body: First digits of the digest of the request's body.
        seed: The run's sampling seed.
        version: The weight version that it is pinned to.
        counts: Pieces sent so far, per choice, this event included.
        usage_sent: Whether the usage event (or the end) has been sent.
    """

    body: str
    seed: int
    version: str
    counts: tuple[int, ...]
    usage_sent: bool = False

    def __str__(self) -> str:
        counts = "-".join(str(count) for count in self.counts)
        return f"{self.body}~{self.seed:x}~{self.version}~{counts}~{int(self.usage_sent)}"

    @staticmethod
    def parse(text: str) -> EventId:
        """Inverse of `str()`.

        Raises:
            BadRequestError: the header holds something else.
        """
        match = _EVENT_ID.fullmatch(text)
        if match is None:
            raise BadRequestError(
                "last-event-id: not an event id of this endpoint",
                remedy="send the id of the last event that arrived, unchanged",
                param="last-event-id",
            )
        return EventId(
            body=match["body"],
            seed=int(match["seed"], 16),
            version=match["version"],
            counts=tuple(int(count) for count in match["counts"].split("-")),
            usage_sent=match["usage"] == "1",
        )


_EVENT_ID = re.compile(
    r"(?P<body>[0-9a-f]{8})~(?P<seed>[0-9a-f]{1,16})~(?P<version>[a-z0-9._@-]{1,120})"
    r"~(?P<counts>\d{1,8}(?:-\d{1,8}){0,127})~(?P<usage>[01])"
)
