"""What a trace file says of prompts and answers: numbers by which equal beginnings are known, and nothing else is."""

import secrets
from hashlib import blake2b
from typing import NamedTuple

from baton.actors.requests import Request
from baton.actors.runtime.events import HistoryEvent
from baton.actors.tokens import WIDTH, Tokens, count, cut

BLOCK = 16
NUMBER_BYTES = 6  # Every reader of JSON has integers of 53 bits.


class History(NamedTuple):
    """at: when the request was submitted. answer: all of it that has come."""

    at: float
    request: Request
    answer: Tokens


class Histories:
    """Hashes histories under a key that is drawn here, and that nobody else ever has.

    Without it a number cannot be told from chance, so nobody can try guesses of a prompt on it. Each number is of all
    before it, the salt included: equal texts of two API keys have nothing in common.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def event(self, history: History) -> HistoryEvent:
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
    """Of all that was hashed so far, which can go on."""
    return int.from_bytes(hashed.copy().digest(), "big")
