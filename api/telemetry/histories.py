"""Hashes of prompts and answers for trace files. They reveal which histories share a beginning, and nothing else."""

import secrets
from hashlib import blake2b
from typing import NamedTuple

from baton.actors.requests import Request
from baton.actors.runtime.events import HistoryEvent
from baton.actors.tokens import WIDTH, Tokens, count, cut

BLOCK = 16  # tokens per hash
NUMBER_BYTES = 6  # size of a hash: 48 bits, because some JSON readers support integers only up to 53 bits


class History(NamedTuple):
    """The tokens of a request that has ended."""

    at: float  # when the request was submitted
    request: Request
    answer: Tokens  # the output tokens that were delivered


class Histories:
    """A maker of keyed hashes of histories, with a random key that never leaves the object.

    Without the key the hashes look random, so guesses of a prompt cannot be tested against them. Each hash covers the
    salt and all tokens up to the end of its block. Equal texts of two API keys therefore have different hashes.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def event(self, history: History) -> HistoryEvent:
        """Return the trace event of a history, with one hash for each complete block of tokens."""
        request = history.request
        tokens = cut(request.tokens, 0, request.prompt_len) + history.answer
        salt = request.salt.encode()
        hashed = blake2b(len(salt).to_bytes(8, "big") + salt, digest_size=NUMBER_BYTES, key=self._key)
        salted = number(hashed) if salt else 0
        blocks = []
        for start in range(0, count(tokens) - BLOCK + 1, BLOCK):
            hashed.update(tokens[start * WIDTH : (start + BLOCK) * WIDTH])
            blocks.append(number(hashed))
        return HistoryEvent(
            history.at,
            request.id,
            request.prompt_len,
            count(history.answer),
            salted,
            BLOCK,
            tuple(blocks),
            request.message_ends,
        )


def number(hashed: blake2b) -> int:
    """Return the hash of the data so far; `hashed` can be updated further."""
    return int.from_bytes(hashed.copy().digest(), "big")
