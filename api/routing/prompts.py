"""Prompts as a router reads them: chains of digests, one for each message or, in long texts, for each block.

A router does not tokenize. From an engine's answer it learns the places of the states of the prompt and of the answer,
and stores them under the digest of the request's messages. A later request that begins with these messages may resume
from those states.

A *beginning* of a prompt ends after a message or block, and has the digest of everything up to there. A *place* is the
position of a state that may exist, and the digest of its tokens.
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
"""The fields that hold the prompt in the different APIs, as a list of messages or as one text."""
SETTINGS = (
    "system", "instructions", "tools", "tool_choice", "cache_salt", "chat_template_kwargs", "reasoning_effort",
    "reasoning", "thinking", "preserve_reasoning", "prompt_name",
)  # fmt: skip
"""The fields that can change the tokens of a prompt before its messages, or which states it may use."""
BLOCK = 2048  # bytes; each block of a longer message or text has a digest of its own
TOKENS_A_BYTE = 0.25  # tokens per byte of prompts, assumed until the first answer
LEAST_ROOM, ROOM_A_STATE = 200_000, 2
"""A router remembers LEAST_ROOM beginnings, or ROOM_A_STATE for each state of the engines if that is more."""
MOST_PLACES = 8  # most places that are remembered for one beginning; the latest ones


@dataclass(frozen=True, slots=True)
class Chain:
    """The beginnings of a prompt, the shortest first; the last one is the whole prompt."""

    digests: Sequence[int]  # digest of each beginning
    sizes: Sequence[int]  # bytes of each beginning


def read_chain(body: Mapping[str, Raw], owner: bytes) -> Chain:
    """Return the chain of a request's body. owner: digest of its API key. Other keys get other chains and states."""
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
    """Yield each message of a body, or its whole prompt as one part."""
    for name in LISTS:
        value = body.get(name)
        if value is None:
            continue
        text = bytes(value)
        # The input of embeddings is a list of texts or numbers, which are not messages of one prompt.
        if text[:1] == b"[" and name in ("messages", "input") and text[1:].lstrip()[:1] == b"{":
            yield from (bytes(item) for item in msgspec.json.decode(text, type=list[Raw]))
        else:
            yield text
        return


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """The knowledge of a beginning, which several prompts may share."""

    length: int = 0  # tokens of the prompt that is this whole beginning; 0: no such prompt has been answered
    places: tuple[Place, ...] = ()  # places of its states, the latest first
    home: Engine | None = None  # the engine that got the latest prompt that is this whole beginning; None: no prompt


UNKNOWN = KnownPrompt()


class Chains:
    """The places of states that engines have computed for prompts, by the digests of the prompts' beginnings."""

    def __init__(self, states: Sized, least_room: int = LEAST_ROOM) -> None:
        """states: a collection of all states of the engines, for their number."""
        self._known: OrderedDict[int, KnownPrompt] = OrderedDict()  # by digest, the least recently used first
        self._states, self._least_room = states, least_room
        self._tokens = self._bytes = 0.0  # decaying sums over the answered prompts

    def demand(self, chain: Chain) -> Demand:
        """Return the length, places and home of a prompt, as far as its beginnings are known."""
        places, tokens, measured = list[Place](), 0, 0
        home, sent = None, 0  # engine of the longest known prompt in it; that prompt's bytes if unanswered
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
        """Note the places of states of a prompt and of its answer.

        The engine knew a place within the prompt before this request. So it belongs to the longest beginning that an
        earlier prompt had too, such as the system message.

        length: tokens of the prompt.
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
        """Add places to a beginning, and set its length unless that is 0."""
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
