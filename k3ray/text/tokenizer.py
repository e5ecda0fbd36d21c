"""`K3Tokenizer`: byte-level BPE whose text never yields a special token.

Ids: the 256 bytes by value, then the merges in order, then reserved ids up to the base, then the
256 special slots. The engine underneath knows neither special tokens nor their names, so no text
can spell one; only `special()` gives their ids. `tokenizer.json` is the `tokenizers` library's own
format and lists the special tokens for other readers. A release's `tiktoken.model` is read, too;
its ids are its ranks, so its bytes lie in an order of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from k3ray.errors import BadRequestError, ConfigError, DataError
from k3ray.text.pre_tokenizer import PATTERN, cut_long
from k3ray.text.special_tokens import (
    END_OF_MSG,
    EOS,
    NUM_SPECIAL,
    PAD,
    special_base,
    token_names_from,
)
from k3ray.text.tiktoken_file import rank_encoder, read_ranks

Merge = tuple[str, str]
"""Two token strings in the byte alphabet that become one."""


class K3Tokenizer:
    """Encode, decode, and the ids of special tokens. Picklable; safe to share between threads.

    Args:
        document: A `tokenizer.json` or `tiktoken.model` as text; use the constructors below.

    Raises:
        DataError: the document is neither.
    """

    def __init__(self, document: str) -> None:
        self._document = document
        if document.lstrip().startswith("{"):
            tokens, self._encode, vocab_size = _json_parts(document)
        else:
            tokens = read_ranks(document)
            self._encode, vocab_size = rank_encoder(tokens), len(tokens) + NUM_SPECIAL
        self._num_text = len(tokens)
        names = token_names_from(self._num_text, vocab_size)
        self._bytes = tokens + [name.encode() for name in names]
        self._special = {name: self._num_text + index for index, name in enumerate(names)}

    @classmethod
    def load(cls, path: str | Path) -> K3Tokenizer:
        """Read a `tokenizer.json` or a `tiktoken.model`.

        Raises:
            DataError: the file is missing, damaged, or neither.
        """
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"cannot read tokenizer {path}: {error}", remedy="curate a data set first"
            ) from error
        except DataError as error:
            raise DataError(
                f"{path} is neither a tokenizer.json nor a tiktoken.model: {error.message}",
                remedy="curate the data set again, or copy the release's file again",
            ) from error

    @classmethod
    def byte_level(cls, vocab_size: int = 2 * NUM_SPECIAL) -> K3Tokenizer:
        """No merges: one token per byte (what `k3-tiny` uses)."""
        return cls.from_merges((), vocab_size=vocab_size)

    @classmethod
    def from_merges(cls, merges: Iterable[Merge], *, vocab_size: int) -> K3Tokenizer:
        """A tokenizer of exactly `vocab_size` ids; ids without a merge are reserved.

        Raises:
            ConfigError: the vocabulary cannot hold bytes, merges and special slots.
        """
        merges = list(merges)
        tokens = [_CHAR_OF[value] for value in range(256)]
        tokens += dict.fromkeys(left + right for left, right in merges)
        if len(tokens) > special_base(vocab_size):
            raise ConfigError(
                f"vocabulary of {vocab_size} cannot hold {len(tokens)} text tokens "
                f"and {NUM_SPECIAL} special slots",
                remedy=f"use vocab_size >= {len(tokens) + NUM_SPECIAL}",
                violations=["vocab_size"],
            )
        return cls(_document(tokens, merges, vocab_size))

    def save(self, path: str | Path) -> None:
        """Write the document atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(self._document)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special and reserved ones included."""
        return len(self._bytes)

    @property
    def num_text_tokens(self) -> int:
        """Ids below this stand for text; all others are special or reserved."""
        return self._num_text

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the document."""
        return hashlib.sha256(self._document.encode()).hexdigest()

    @property
    def end_of_msg_id(self) -> int:
        """Where generation stops."""
        return self._special[END_OF_MSG]

    @property
    def eos_id(self) -> int:
        """End of a training document."""
        return self._special[EOS]

    @property
    def pad_id(self) -> int:
        """Padding; never a target."""
        return self._special[PAD]

    def special(self, name: str) -> int:
        """The id of a special token, such as `[EOS]`.

        Raises:
            ConfigError: no special token has this name.
        """
        if name not in self._special:
            raise ConfigError(
                f"no special token is called {name!r}",
                remedy="see k3ray.text.special_tokens", violations=[name],
            )  # fmt: skip
        return self._special[name]

    def is_special(self, token: int) -> bool:
        """Whether `token` is a special or reserved id."""
        return self._num_text <= token < len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, all of them text tokens whatever the text spells.

        Raises:
            BadRequestError: the text holds half a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(
                f"text holds half a surrogate pair at character {error.start}",
                remedy="send well-formed Unicode",
            ) from error
        tokens: list[int] = []
        for piece in cut_long(text):
            tokens += self._encode(piece)
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD.

        Args:
            skip_special: Leave special and reserved tokens out instead of writing their names.
        """
        return self.decode_bytes(tokens, skip_special=skip_special).decode(errors="replace")

    def decode_bytes(self, tokens: Sequence[int], *, skip_special: bool = True) -> bytes:
        """Bytes of `tokens`, the exact inverse of `encode`."""
        return b"".join(
            self.token_bytes(token)
            for token in tokens
            if not (skip_special and self.is_special(token))
        )

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token; a special token's are its name.

        Raises:
            BadRequestError: the id is outside the vocabulary.
        """
        if not 0 <= token < len(self._bytes):
            raise BadRequestError(
                f"token id {token} is outside the vocabulary of {self.vocab_size}",
                remedy="use this model's tokenizer", param="token",
            )  # fmt: skip
        return self._bytes[token]

    def __reduce__(self) -> tuple[type[K3Tokenizer], tuple[str]]:
        return type(self), (self._document,)


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in `tokenizer.json` (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(256)]


_CHAR_OF = _byte_alphabet()
_BYTE_OF = {char: value for value, char in enumerate(_CHAR_OF)}


def _document(tokens: Sequence[str], merges: Sequence[Merge], vocab_size: int) -> str:
    """Canonical `tokenizer.json`."""
    names = token_names_from(len(tokens), vocab_size)
    flags = {
        "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }  # fmt: skip
    value = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": len(tokens) + index, "content": name, **flags}
            for index, name in enumerate(names)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated",
             "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False},
        ]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }  # fmt: skip
    return json.dumps(value, ensure_ascii=True, indent=1) + "\n"


def _json_parts(document: str) -> tuple[list[bytes], Callable[[str], list[int]], int]:
    """(bytes of each text token, encoder, vocabulary size) of a `tokenizer.json`."""
    parsed = _checked(document)
    vocab: dict[str, int] = parsed["model"]["vocab"]  # in the order of ids
    tokens = [bytes(_BYTE_OF[char] for char in text) for text in vocab]
    core = Tokenizer.from_str(json.dumps({**parsed, "added_tokens": []}))

    def encode(text: str) -> list[int]:
        # the batch door, because the plain one also computes offsets (1.4x the time)
        ids: list[int] = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return tokens, encode, len(tokens) + len(parsed["added_tokens"])


def _checked(document: str) -> dict[str, Any]:
    """The parsed document, if ids are dense, bytes come first and the special slots last."""
    try:
        parsed: dict[str, Any] = json.loads(document)
        tokens, names = list(parsed["model"]["vocab"].items()), parsed["added_tokens"]
        vocab_size = len(tokens) + len(names)
        whole = (
            [text for text, _ in tokens[:256]] == _CHAR_OF
            and [token for _, token in tokens] == list(range(len(tokens)))
            and [item["content"] for item in names] == token_names_from(len(tokens), vocab_size)
            and len(names) >= NUM_SPECIAL
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"not a tokenizer.json: {error}", remedy="curate the data set again"
        ) from error
    if not whole:
        raise DataError(
            "tokenizer.json does not hold 256 bytes, merges, and K3's special slots in order",
            remedy="use a tokenizer that k3ray wrote, or curate the data set again",
        )
    return parsed
