"""Turning tokens into text one at a time: `IncrementalDetokenizer`.

The concatenated deltas equal one decode of all tokens: no character is sent twice, and U+FFFD
appears only where the whole text has it, because bytes of an unfinished character are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from k3ray.text.tokenizer import K3Tokenizer


class IncrementalDetokenizer:
    """Decodes one stream of tokens.

    Args:
        tokenizer: The stream's tokenizer.
        skip_special: Leave special and reserved tokens out, as `K3Tokenizer.decode` does.
    """

    def __init__(self, tokenizer: K3Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete; possibly empty."""
        return "".join(self._decoder.decode(self._bytes(token)) for token in tokens)

    def finish(self) -> str:
        """What an unfinished character at the end decodes to; the stream is over."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        if self._skip_special and self._tokenizer.is_special(token):
            return b""
        return self._tokenizer.token_bytes(token)
