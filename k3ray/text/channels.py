"""Reading the model's own XTML as it streams: `ChannelSplitter` sorts text into channels.

A state machine over tokens, so that streaming gives exactly what the whole would. It starts inside
the channel that the generation prompt opened and ends at `<|end_of_msg|>`. Only control *tokens*
structure the text; what merely looks like them is text. Elements other than `think` and `response`
are tracked for nesting and their text is not shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from k3ray.text.detokenize import IncrementalDetokenizer
from k3ray.text.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP
from k3ray.text.tokenizer import K3Tokenizer


class Channel(StrEnum):
    """The channels of an assistant message that hold text for the reader."""

    THINK = "think"
    RESPONSE = "response"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelText:
    """New text of one channel."""

    channel: Channel
    text: str


class ChannelSplitter:
    """Splits one answer.

    Args:
        tokenizer: The model's.
        channel: The channel that the generation prompt opened.
    """

    def __init__(self, tokenizer: K3Tokenizer, *, channel: Channel = Channel.RESPONSE) -> None:
        self._tokenizer = tokenizer
        self._controls = {tokenizer.special(name): name for name in (OPEN, CLOSE, SEP, END_OF_MSG)}
        self._elements: list[str] = ["message", channel]
        self._tag: str | None = None
        self._tag_text = ""
        self._text = IncrementalDetokenizer(tokenizer)
        self._name = IncrementalDetokenizer(tokenizer)
        self.done = False

    def feed(self, tokens: Iterable[int]) -> list[ChannelText]:
        """The new text, in order; tokens after the end of the message are ignored."""
        found: list[ChannelText] = []
        for token in tokens:
            if self.done:
                break
            self._take(token, found)
        return found

    def finish(self) -> list[ChannelText]:
        """What the unfinished character at the end decodes to; the stream is over."""
        found: list[ChannelText] = []
        self._show(self._text.finish(), found)
        self.done = True
        return found

    def _take(self, token: int, found: list[ChannelText]) -> None:
        control = self._controls.get(token)
        if control is None and self._tag is None:
            self._show(self._text.feed((token,)), found)
            return
        if control is None:
            self._tag_text += self._name.feed((token,))
            return
        self._show(self._text.finish(), found)
        self._text = IncrementalDetokenizer(self._tokenizer)
        if control == END_OF_MSG:
            self.done = True
        elif control == SEP:
            self._end_tag()
        else:
            self._tag, self._tag_text = control, ""
            self._name = IncrementalDetokenizer(self._tokenizer)

    def _end_tag(self) -> None:
        """A `<|sep|>` without an open tag is a stray and changes nothing."""
        if self._tag == OPEN:
            self._elements.append(self._tag_text.partition(" ")[0])
        elif self._tag == CLOSE and self._elements:
            self._elements.pop()
        self._tag = None

    def _show(self, text: str, found: list[ChannelText]) -> None:
        if text and self._elements and self._elements[-1] in set(Channel):
            found.append(ChannelText(channel=Channel(self._elements[-1]), text=text))
