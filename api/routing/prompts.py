"""Prompts as a router reads them: chains of digests, one for each message or, in long texts, for each block.

A router does not tokenize. It learns from an engine's answer where the states of a prompt and of its answer lie, under
the digest of the request's messages; a later request whose messages begin with the same ones may resume from there.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace

import msgspec

from baton.api.routing.choice import Demand, Place
from baton.api.routing.index import Engine

Raw = msgspec.Raw
LISTS = ("messages", "input", "prompt", "text", "input_ids")
"""The fields in which an API has its prompt, as a list of messages or as one text."""
SETTINGS = (
    "system", "instructions", "tools", "tool_choice", "cache_salt", "chat_template_kwargs", "reasoning_effort",
    "reasoning", "thinking", "preserve_reasoning", "prompt_name",
)  # fmt: skip
"""The fields that change the beginning of a prompt."""
BLOCK = 2048  # bytes of a long message or text that have a digest of their own
TOKENS_A_BYTE = 0.25  # of prompts, until answers have shown it
LEAST_ROOM = 200_000  # beginnings that are known at most, or more:
ROOM_A_STATE = 2  # for each state that engines have
MOST_PLACES = 8  # of a beginning, the latest ones


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
        for at in range(0, len(part), BLOCK):
            block = part[at : at + BLOCK]
            digest.update(block)
            size += len(block)
            if at + BLOCK >= len(part):
                digest.update(len(part).to_bytes(8, "little"))
            digests.append(int.from_bytes(digest.digest(), "little"))
            sizes.append(size)
    return Chain(digests, sizes)


def _parts(body: Mapping[str, Raw]) -> Iterator[bytes]:
    """Yield the messages of a body, or its prompt as one part."""
    for name in LISTS:
        value = body.get(name)
        if value is None:
            continue
        text = bytes(value)
        # A list of embeddings' inputs holds texts or numbers, which are not the beginnings of one prompt.
        if text[:1] == b"[" and name in ("messages", "input") and text[1:].lstrip()[:1] == b"{":
            yield from (bytes(item) for item in msgspec.json.decode(text, type=list[Raw]))
        else:
            yield text
        return


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A beginning that several prompts may have, with what is known of it."""

    length: int = 0  # of the prompt that ends there, in tokens; 0: none has been answered
    places: tuple[Place, ...] = ()  # where states may lie
    home: Engine | None = None  # the engine that got the latest prompt that ends there; None: none ends there


UNKNOWN = KnownPrompt()


class Chains:
    """Where the states of prompts lie that engines have computed, by the digests of the requests' messages."""

    def __init__(self, states: Sized, least_room: int = LEAST_ROOM) -> None:
        """states: all states of the engines."""
        self._known: OrderedDict[int, KnownPrompt] = OrderedDict()  # the least recently used first
        self._states, self._least_room = states, least_room
        self._tokens = self._bytes = 0.0  # of all prompts, the recent ones counting most

    def demand(self, chain: Chain) -> Demand:
        """Return what is known of a prompt."""
        places, tokens, measured = list[Place](), 0, 0
        home, sent = None, 0  # where the longest known prompt went, and its bytes while it has not been answered
        for digest, size in zip(reversed(chain.digests), reversed(chain.sizes), strict=True):
            known = self._known.get(digest)
            if known is None:
                continue
            self._known.move_to_end(digest)
            places += known.places
            if home is None and known.home is not None:
                home, sent = known.home, 0 if known.length else size
            if not measured and known.length:
                tokens, measured = known.length, size
        whole = chain.sizes[-1] if chain.sizes else 0
        length = tokens + round((whole - measured) * self._ratio)
        coming = length * sent // whole if sent else 0
        return Demand(length, sorted(places, reverse=True), home, coming)

    def sent(self, chain: Chain, engine: Engine) -> None:
        """Note that a prompt was sent to an engine."""
        if chain.digests:
            whole = chain.digests[-1]
            self._add(whole, replace(self._known.get(whole, UNKNOWN), home=engine))

    def learn(self, chain: Chain, length: int, places: Sequence[Place]) -> None:
        """Note where states of a prompt, and of its answer, may lie.

        A place within the prompt was known to the engine before: it belongs to the longest beginning that another
        prompt had too, such as a system message.

        length: of the prompt, in tokens.
        """
        if not chain.digests:
            return
        self._tokens = 0.99 * self._tokens + length
        self._bytes = 0.99 * self._bytes + chain.sizes[-1]
        *beginnings, whole = chain.digests
        common = next((digest for digest in reversed(chain.digests) if digest in self._known), None)
        if common is not None:
            self._place(common, [place for place in places if place[0] < length])
        for digest in beginnings:
            self._place(digest, ())
        self._place(whole, [place for place in places if place[0] >= length], length)

    def _place(self, digest: int, places: Sequence[Place], length: int = 0) -> None:
        """Note where states of a beginning may lie, and the length of a prompt that ends there."""
        known = self._known.get(digest, UNKNOWN)
        merged = tuple(dict.fromkeys((*places, *known.places)))[:MOST_PLACES]
        self._add(digest, replace(known, length=length or known.length, places=merged))

    def _add(self, digest: int, known: KnownPrompt) -> None:
        self._known[digest] = known
        self._known.move_to_end(digest)
        while len(self._known) > max(self._least_room, ROOM_A_STATE * len(self._states)):
            self._known.popitem(last=False)

    @property
    def _ratio(self) -> float:
        return self._tokens / self._bytes if self._bytes else TOKENS_A_BYTE
