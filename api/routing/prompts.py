"""Prompts as a router reads them: chains of digests, one for each message.

A router does not tokenize. It learns from an engine's answer where the states of a prompt and of its answer lie, under
the digest of the request's messages; a later request whose messages begin with the same ones may resume from there.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from baton.api.routing.choice import Demand, Place

Raw = msgspec.Raw
LISTS = ("messages", "input", "prompt", "text", "input_ids")
"""The fields in which an API has its prompt, as a list of messages or as one text."""
SETTINGS = (
    "system", "instructions", "tools", "tool_choice", "cache_salt", "chat_template_kwargs", "reasoning_effort",
    "reasoning", "thinking",
)  # fmt: skip
"""The fields that change the beginning of a prompt."""
TOKENS_A_BYTE = 0.25  # of prompts, until answers have shown it
MOST_CHAINS = 200_000


@dataclass(frozen=True, slots=True)
class Chain:
    """The beginnings of a prompt, the shortest first."""

    digests: Sequence[int]  # of each beginning
    sizes: Sequence[int]  # bytes of each beginning


def read_chain(body: Mapping[str, Raw], owner: bytes) -> Chain:
    """Return the chain of a request's body. owner: the digest of its API key, whose states no other has."""
    digest = hashlib.blake2b(owner, digest_size=8)
    size, digests, sizes = 0, list[int](), list[int]()
    for name in SETTINGS:
        if (value := body.get(name)) is not None:
            digest.update(name.encode() + bytes(value))
            size += len(bytes(value))
    for part in _parts(body):
        digest.update(len(part).to_bytes(8, "little") + part)
        size += len(part)
        digests.append(int.from_bytes(digest.digest(), "little"))
        sizes.append(size)
    return Chain(digests, sizes)


def _parts(body: Mapping[str, Raw]) -> Iterator[bytes]:
    """Yield the messages of a body, or its prompt as a whole."""
    for name in LISTS:
        value = body.get(name)
        if value is None:
            continue
        text = bytes(value)
        if text[:1] == b"[" and name in ("messages", "input"):
            yield from (bytes(item) for item in msgspec.json.decode(text, type=list[Raw]))
        else:
            yield text
        return


class Chains:
    """Where the states of prompts lie that engines have computed, by the digests of the requests' messages."""

    def __init__(self, most: int = MOST_CHAINS) -> None:
        self._places: OrderedDict[int, tuple[int, Sequence[Place]]] = OrderedDict()  # the least recently used first
        self._most = most
        self._tokens = self._bytes = 0.0  # of all prompts, the recent ones counting most

    def demand(self, chain: Chain) -> Demand:
        """Return what is known of a prompt."""
        for digest, size in zip(reversed(chain.digests), reversed(chain.sizes), strict=True):
            if (known := self._places.get(digest)) is not None:
                self._places.move_to_end(digest)
                length, places = known
                return Demand(length + round((chain.sizes[-1] - size) * self._ratio), places)
        return Demand(round((chain.sizes[-1] if chain.sizes else 0) * self._ratio), ())

    def learn(self, chain: Chain, length: int, places: Sequence[Place]) -> None:
        """Note where states of a prompt, and of its answer, may lie. length: of the prompt, in tokens."""
        if not chain.digests:
            return
        self._tokens = 0.99 * self._tokens + length
        self._bytes = 0.99 * self._bytes + chain.sizes[-1]
        self._places[chain.digests[-1]] = length, sorted(places, reverse=True)
        self._places.move_to_end(chain.digests[-1])
        if len(self._places) > self._most:
            self._places.popitem(last=False)

    @property
    def _ratio(self) -> float:
        return self._tokens / self._bytes if self._bytes else TOKENS_A_BYTE
