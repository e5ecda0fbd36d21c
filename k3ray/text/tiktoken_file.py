"""The release's own tokenizer file, `tiktoken.model`: a line of base64 bytes and rank per token.

A rank is the token's id and its priority in merging. The `tiktoken` library does the merging.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence

import tiktoken

from k3ray.errors import DataError
from k3ray.text.pre_tokenizer import PATTERN


def read_ranks(document: str) -> list[bytes]:
    """The bytes of every token, by rank.

    Raises:
        DataError: a line is damaged, a rank or a token is there twice, a rank is left out, or one
            of the 256 single bytes is missing.
    """
    by_rank: dict[int, bytes] = {}
    for number, line in enumerate(document.splitlines(), 1):
        if not line.strip():
            continue
        try:
            coded, rank_text = line.split(maxsplit=1)
            token, rank = base64.b64decode(coded, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            raise _refused(f"line {number} is no base64 token and rank") from None
        if rank in by_rank:
            raise _refused(f"line {number}: rank {rank} is there twice")
        by_rank[rank] = token
    tokens = [by_rank[rank] for rank in sorted(by_rank)]
    if sorted(by_rank) != list(range(len(tokens))):
        raise _refused("the ranks are not 0, 1, 2, ...")
    if len(set(tokens)) != len(tokens) or b"" in by_rank.values():
        raise _refused("a token is empty or there twice")
    missing = {bytes([value]) for value in range(256)} - set(tokens)
    if missing:
        raise _refused(f"{len(missing)} of the 256 single bytes have no token")
    return tokens


def rank_encoder(tokens: Sequence[bytes]) -> Callable[[str], list[int]]:
    """Text to ids; no text yields an id above the ranks."""
    encoding = tiktoken.Encoding(
        "k3",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )
    return encoding.encode_ordinary


def _refused(problem: str) -> DataError:
    return DataError(f"tiktoken.model: {problem}", remedy="copy the file from the release again")
