"""Digest of the code that runs here and of the bits it computes, told in every handshake.

Two processes that exchange tensors must have the same of both.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def code_digest() -> str:
    """Hex digest over the path and bytes of every Python file of k3ray; computed once."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def process_digest(numeric: str = "") -> str:
    """What a process shows in a handshake: code digest, then numeric digest.

    Args:
        numeric: Of the start-up self-test (`model.self_test`); empty where no bits are promised.
    """
    return f"{code_digest()}/{numeric}"
