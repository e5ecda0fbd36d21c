"""Tokens of one choice -> pieces: text, stop strings, think and response channels, tool calls.

A pure state machine: the same tokens give the same pieces however they arrive. Text that could be
the start of a stop string waits; the token that completes one ends the choice. Stop strings watch
the answer, not the thinking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3ray.engine.request import FinishReason, TokenEvent
from k3ray.serve.api import Call, CallKind
from k3ray.serve.pieces import Alternative, Piece, SentToken
from k3ray.text.chat import Channel
from k3ray.text.detokenize import IncrementalDetokenizer
from k3ray.text.stop_strings import StopMatcher
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.xtml_parser import AnswerParser, CallText, ChannelText, Found

TOOL_CALLS = "tool_calls"
_LOWEST_LOGPROB = -9999.0


class TextStream:
    """One choice's text.

    Args:
        call: Says whether log-probabilities or token ids are wanted, and the stop strings.
        channel: Where a chat answer begins; None for a completion, whose text is all answer.
    """

    def __init__(self, call: Call, tokenizer: K3Tokenizer, *, channel: Channel | None) -> None:
        self.tokens: list[int] = []
        self.finished = False
        self._call = call
        self._tokenizer = tokenizer
        self._parser = (
            _PlainText(tokenizer) if channel is None else AnswerParser(tokenizer, channel=channel)
        )
        self._stops = StopMatcher(call.stop)
        self._unsent: list[SentToken] = []
        self._one_too_many = False

    def first(self, echo: str | None) -> list[Piece]:
        """The pieces before any token: the role of a chat, the prompt to echo."""
        if self._call.kind is CallKind.CHAT:
            return [Piece(opens=True)]
        return [Piece(content=echo)] if echo else []

    def feed(self, event: TokenEvent) -> Sequence[Piece]:
        """The piece that an event completes, if it does."""
        if self.finished:
            return ()
        new = _New()
        if event.token is not None:
            self.tokens.append(event.token)
            self._unsent.append(self._sent(event, event.token))
            self._sort(self._parser.feed((event.token,)), new)
        if event.finish is not None:
            self._sort(self._parser.finish(), new)
            new.content += self._stops.finish()  # nothing after a stop string
        finish = self._finish(event)
        self.finished = finish is not None
        wanted = self._call.logprobs or self._call.return_token_ids
        if not (new.content or new.reasoning or new.calls or finish or (wanted and self._unsent)):
            return ()
        sent, self._unsent = tuple(self._unsent), []
        return (
            Piece(
                content=new.content,
                reasoning=new.reasoning,
                calls=tuple(new.calls),
                tokens=sent,
                finish=finish,
            ),
        )

    def _finish(self, event: TokenEvent) -> str | None:
        """OpenAI's word: an answer that ends by itself and holds calls waits for their results."""
        if self._stops.matched is not None:
            return FinishReason.STOP.value
        ended = event.finish is FinishReason.STOP or self._one_too_many
        if ended and self._parser.num_calls:
            return TOOL_CALLS
        return None if event.finish is None else event.finish.value

    def _sort(self, found: Sequence[Found], new: _New) -> None:
        """What may be sent now."""
        for part in found:
            if isinstance(part, CallText):
                self._one_too_many |= self._call.one_tool_call and part.index > 0
                if not self._one_too_many:
                    new.calls.append(part)
            elif part.channel is Channel.THINK:
                new.reasoning += part.text
            else:
                new.content += self._stops.feed(part.text)

    def _sent(self, event: TokenEvent, token: int) -> SentToken:
        if not self._call.logprobs:
            return SentToken(token=token, text="", raw=b"", logprob=0.0)
        raw = self._tokenizer.token_bytes(token)
        return SentToken(
            token=token,
            text=token_text(raw),
            raw=raw,
            logprob=max(event.logprob, _LOWEST_LOGPROB),
            top=tuple(self._alternative(other, value) for other, value in event.top_logprobs),
        )

    def _alternative(self, token: int, logprob: float) -> Alternative:
        raw = self._tokenizer.token_bytes(token)
        return Alternative(text=token_text(raw), raw=raw, logprob=max(logprob, _LOWEST_LOGPROB))


@dataclass(slots=True)
class _New:
    """What one event adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallText] = field(default_factory=list)


class _PlainText:
    """A completion's text: all of it is the answer."""

    num_calls = 0

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._decoder = IncrementalDetokenizer(tokenizer)

    def feed(self, tokens: Sequence[int]) -> list[Found]:
        return [ChannelText(channel=Channel.RESPONSE, text=self._decoder.feed(tokens))]

    def finish(self) -> list[Found]:
        return [ChannelText(channel=Channel.RESPONSE, text=self._decoder.finish())]


def token_text(raw: bytes) -> str:
    """A token's bytes as text; bytes that are no characters are spelled as OpenAI does.

    >>> token_text(b"ab")
    'ab'
    >>> token_text(bytes([0xe4]))
    'bytes:\\\\xe4'
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)
