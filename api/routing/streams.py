"""Copies of streams from an engine to a client, which another engine can continue."""

import re

import msgspec

from baton.api.events.places import END, PLACES
from baton.api.resuming import COMMENT, Begun, Resumption, SentPart, TokensSent

THEN_COMMENT = END + b":"
COLON = ord(":")
PINGS = (b": ping", b"event: ping")
EVENT = msgspec.json.Decoder(Begun | TokensSent)
UNIQUE = re.compile(r"[0-9a-f]{32}")
CREATED = re.compile(rb'"created": ?\d+')


class StreamCopy:
    """The frames of a stream, which are passed on together with the engine's comment on the tokens in them.

    If an engine fails, frames without their comment are dropped: another engine sends their tokens again. Its own
    beginning of the stream is dropped too, up to the first tokens that the client does not have; and in what follows
    its ids and its time of creation are replaced by those that the client knows.
    """

    def __init__(self) -> None:
        self.places = ""  # where the engine's states lie, at the end
        self._begun: Begun | None = None  # of the first engine
        self._tokens: list[bytearray] = []  # of each sequence, as far as they were passed on
        self._shown: list[int] = []
        self._events = 0  # of a response, as the engine counts them
        self._ended: set[int] = set()  # the sequences that have ended
        self._rest = b""  # the beginning of a frame
        self._frames: list[bytes] = []  # frames whose comment has not come yet
        self._created: bytes | None = None  # the field of the first frames; empty: they have none
        self._to_skip = 0  # comments until the client has no more of the stream
        self._renamed: list[tuple[bytes, bytes]] = []

    @property
    def resumption(self) -> Resumption | None:
        """The part of the stream that the client has, from which another engine continues; None if that is nothing."""
        if self._begun is None:
            return None
        tokens = zip(self._tokens, self._shown, strict=True)
        parts = [SentPart(index, bytes(each), shown, False) for index, (each, shown) in enumerate(tokens)]
        return Resumption(begun=self._begun, parts=parts, events=self._events)

    @property
    def id(self) -> str:
        """The id of the first sequence; empty until the engine has said it."""
        return self._begun.ids[0] if self._begun is not None else ""

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can continue the stream: not if some of several sequences have ended."""
        return not self._ended

    @property
    def complete(self) -> bool:
        """Whether the client has the whole stream, so that only the end of the connection is missing."""
        return self._begun is not None and len(self._ended) == len(self._tokens)

    def begin_again(self) -> None:
        """Expect the stream of another engine."""
        self._rest, self._frames, self._renamed = b"", [], []
        self._to_skip = 2 if self._begun is not None else 0

    def take(self, chunk: bytes) -> bytes:
        """Take in a chunk of the engine's stream. Return what the client gets."""
        if self._created is not None and not (self._renamed or self._to_skip or self._frames or self._rest):
            passed = self._take_plain(chunk)
            if passed is not None:
                return passed
        *frames, self._rest = (self._rest + chunk).split(END)
        ready = list[bytes]()
        for frame in frames:
            if frame.startswith(COMMENT):
                self._comment(EVENT.decode(frame[len(COMMENT) :]), ready)
            elif frame.startswith(PLACES):
                self.places = frame[len(PLACES) :].decode()
            elif frame.startswith(PINGS) and not self._frames:
                ready.append(frame + END)
            else:
                self._frames.append(frame + END)
        return b"".join(ready)

    def _take_plain(self, chunk: bytes) -> bytes | None:
        """Take in a chunk that consists of events and the comment on their tokens, as almost all do; None: it does not.

        The events are not looked at.
        """
        at = chunk.find(THEN_COMMENT) + len(END)
        if at < len(THEN_COMMENT) or chunk[0] == COLON or not chunk.startswith(COMMENT, at):
            return None
        if chunk.find(END, at) != len(chunk) - len(END):
            return None
        event = EVENT.decode(chunk[at + len(COMMENT) :])
        if not isinstance(event, TokensSent):
            return None
        self._count(event)
        return chunk[:at]

    def rest(self) -> bytes:
        """Return the events at the end of a complete stream that no comment follows, such as an error."""
        frames, self._frames = self._frames, []
        return b"".join(self._as_begun(frame) for frame in frames) + self._rest

    def _comment(self, event: Begun | TokensSent, ready: list[bytes]) -> None:
        frames, self._frames = self._frames, []
        if isinstance(event, Begun):
            self._begin(event, frames)
        elif not self._to_skip:
            self._count(event)
        if self._to_skip:
            self._to_skip -= 1
        else:
            ready += (self._as_begun(frame) for frame in frames)
        if self._created is None and frames:
            self._created = first_created(frames)

    def _begin(self, event: Begun, frames: list[bytes]) -> None:
        if self._begun is None:
            self._begun = event
            self._tokens, self._shown = [bytearray() for _ in event.ids], [0] * len(event.ids)
            return
        ids = zip(unique_in(event.ids), unique_in(self._begun.ids), strict=False)
        self._renamed = [(other.encode(), own.encode()) for other, own in ids if other != own]

    def _count(self, event: TokensSent) -> None:
        self._events = event.events
        for part in event.parts:
            self._tokens[part.index] += part.tokens
            self._shown[part.index] = part.shown
            if part.ended:
                self._ended.add(part.index)

    def _as_begun(self, frame: bytes) -> bytes:
        """Return a frame with the ids and the time of the engine that has begun the stream."""
        for other, own in self._renamed:
            frame = frame.replace(other, own)
        return CREATED.sub(self._created, frame, count=1) if self._renamed and self._created else frame


def unique_in(ids: list[str]) -> list[str]:
    """Return the random part of the first id, if it has one."""
    return UNIQUE.findall(ids[0])


def first_created(frames: list[bytes]) -> bytes:
    """Return the field `created` of the first frame that has one; empty if none has."""
    found = (CREATED.search(frame) for frame in frames)
    return next((match[0] for match in found if match is not None), b"")
