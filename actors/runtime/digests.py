"""Digests of token sequences, by which a router knows states without their tokens.

The digest of n tokens is s + Σ m(tᵢ) · Bⁱ modulo 2⁶⁴, with s from the salt, and m(t) a mix of the token's bits. So a
sequence's digest follows from that of its beginning, and all beginnings are digested by one cumulative sum. A router
takes equal digests for equal sequences; if that is ever wrong, a request only goes to another engine.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from baton.actors.tokens import Tokens

Digests = NDArray[np.uint64]
BASE = np.uint64(0x9E3779B97F4A7C15)
# Source: Sebastiano Vigna, splitmix64.c, public domain.
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Digester:
    """A maker of digests. It keeps the powers of the base for the longest sequence so far."""

    def __init__(self) -> None:
        self._powers: Digests = np.ones(1, np.uint64)

    def beginning(self, salt: str) -> int:
        """Return the digest of no tokens under a salt."""
        return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")

    def extended(self, digest: int, start: int, tokens: Tokens) -> Digests:
        """Return the digests after each of `tokens`, which follow `start` tokens that have this digest: uint64 [n]."""
        ids = np.frombuffer(tokens, np.int32).astype(np.uint64)
        terms = _mixed(ids) * self._powers_to(start + len(ids))[start:]
        return np.uint64(digest) + np.cumsum(terms, dtype=np.uint64)

    def _powers_to(self, count: int) -> Digests:
        """Return the powers B⁰ … B^(count - 1)."""
        if len(self._powers) < count:
            size = max(count, 2 * len(self._powers))
            self._powers = np.cumprod(np.concatenate([np.ones(1, np.uint64), np.full(size - 1, BASE)]), dtype=np.uint64)
        return self._powers[:count]


def _mixed(ids: Digests) -> Digests:
    """Mix the bits of each number."""
    mixed = (ids + np.uint64(1)) * BASE
    mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
    return mixed ^ (mixed >> np.uint64(31))
