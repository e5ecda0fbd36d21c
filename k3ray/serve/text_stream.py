"""Tokens of one choice -> pieces: incremental text, stop strings, think and response channels.

A pure state machine: the same tokens give the same pieces however they arrive. Text that could be
the start of a stop string waits; the token that completes one ends the choice. Stop strings watch
the answer, not the thinking.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3ray.engine.request import FinishReason, TokenEvent
from k3ray.serve.api import Call, CallKind
from k3ray.serve.pieces import Alternative, Piece, SentToken
from k3ray.text.channels import Channel, ChannelSplitter, ChannelText
from k3ray.text.detokenize import IncrementalDetokenizer
from k3ray.text.stop_strings import StopMatcher
from k3ray.text.tokenizer import K3Tokenizer

_LOWEST_LOGPROB = -9999.0


class TextStream:
    """One choice's text.

    Args:
        call: Says whether log-probabilities or token ids are wanted, and the stop strings.
        thinking: Whether the choice begins in the think channel (chat only).
    """

    def __init__(self, call: Call, tokenizer: K3Tokenizer, *, thinking: bool) -> None:
        self.tokens: list[int] = []
        self.finished = False
        self._call = call
        self._tokenizer = tokenizer
        self._splitter: ChannelSplitter | _PlainText
        if call.kind is CallKind.CHAT:
            start = Channel.THINK if thinking else Channel.RESPONSE
            self._splitter = ChannelSplitter(tokenizer, channel=start)
        else:
            self._splitter = _PlainText(tokenizer)
        self._stops = StopMatcher(call.stop)
        self._unsent: list[SentToken] = []

    def first(self, echo: str | None) -> list[Piece]:
        """The pieces before any token: the role of a chat, the prompt to echo."""
        if self._call.kind is CallKind.CHAT:
            return [Piece(opens=True)]
        return [Piece(content=echo)] if echo else []

    def feed(self, event: TokenEvent) -> Sequence[Piece]:
        """The piece that an event completes, if it does."""
        if self.finished:
            return ()
        content = reasoning = ""
        if event.token is not None:
            self.tokens.append(event.token)
            self._unsent.append(self._sent(event, event.token))
            content, reasoning = self._sort(self._splitter.feed((event.token,)))
        if event.finish is not None:
            rest_content, rest_reasoning = self._rest()
            content, reasoning = content + rest_content, reasoning + rest_reasoning
        finish = FinishReason.STOP if self._stops.matched is not None else event.finish
        self.finished = finish is not None
        wanted = self._call.logprobs or self._call.return_token_ids
        if not (content or reasoning or finish or (wanted and self._unsent)):
            return ()
        sent, self._unsent = tuple(self._unsent), []
        return (
            Piece(
                content=content,
                reasoning=reasoning,
                tokens=sent,
                finish=None if finish is None else finish.value,
            ),
        )

    def _sort(self, texts: Sequence[ChannelText]) -> tuple[str, str]:
        """(content, reasoning) that may be sent now."""
        content = reasoning = ""
        for part in texts:
            if part.channel is Channel.THINK:
                reasoning += part.text
            else:
                content += self._stops.feed(part.text)
        return content, reasoning

    def _rest(self) -> tuple[str, str]:
        """What was held back; nothing of it after a stop string."""
        content, reasoning = self._sort(self._splitter.finish())
        return content + self._stops.finish(), reasoning

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


class _PlainText:
    """A completion's text: all of it is the answer."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._decoder = IncrementalDetokenizer(tokenizer)

    def feed(self, tokens: Sequence[int]) -> list[ChannelText]:
        return [ChannelText(channel=Channel.RESPONSE, text=self._decoder.feed(tokens))]

    def finish(self) -> list[ChannelText]:
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
