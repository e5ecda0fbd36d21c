"""Seeded hashes that replace random choices: the same on every machine, in any order."""

from __future__ import annotations

import hashlib


def seeded_hash(seed: int, purpose: str, key: str) -> int:
    """64 uniform bits that depend on seed, purpose and key only."""
    data = f"{seed}\0{purpose}\0{key}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def seeded_fraction(seed: int, purpose: str, key: str) -> float:
    """The same bits as a number in [0, 1)."""
    return (seeded_hash(seed, purpose, key) >> 11) / 2.0**53
