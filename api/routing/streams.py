"""Copying of a stream from an engine to a client, so that another engine can continue the stream."""

import re

import msgspec

from baton.api.events.places import END, PLACES
from baton.api.resuming import COMMENT, Begun, Resumption, SentPart, TokensSent

THEN_COMMENT = END + b":"
COLON = ord(":")
PINGS = (b": ping", b"event: ping")
EVENT = msgspec.json.Decoder(Begun | TokensSent)
UNREADABLE = (msgspec.MsgspecError, ValueError, IndexError, RecursionError)
"""The errors for a comment of an engine of another version, or of one with a fault."""
UNIQUE = re.compile(r"[0-9a-f]{32}")
CREATED = re.compile(rb'"created": ?\d+')


class StreamCopy:
    """The state of a stream that is copied, which says what the client has.

    Frames wait until the engine's comment on their tokens arrives (`resuming.TokensSent`), and are then passed on. If
    the engine fails, the waiting frames are dropped, because another engine sends their tokens again.

    The other engine's stream has an opening and the tokens that the client already has; both are dropped. In later
    frames its ids and its creation time are replaced by those of the first engine, which the client knows.
    """

    def __init__(self) -> None:
        self.places = ""  # the result of `places_of` at the end of the stream
        self.fault = ""  # why the engine's stream cannot be read further; empty: it can
        self._begun: Begun | None = None  # the first comment of the first engine
        self._tokens: list[bytearray] = []  # the tokens of each sequence that the client has
        self._shown: list[int] = []  # characters of each sequence that the client can have seen
        self._events = 0  # number of a response's events that the client has
        self._ended: set[int] = set()  # indices of the sequences that have ended
        self._rest = b""  # an incomplete frame
        self._frames: list[bytes] = []  # frames whose comment has not arrived yet
        self._created: bytes | None = None  # the field `created` of the first frames; empty: they have none
        self._to_skip = 0  # number of comments up to which frames are dropped, because the client has them
        self._renamed: list[tuple[bytes, bytes]] = []  # (id of another engine, id that the client knows)

    @property
    def resumption(self) -> Resumption | None:
        """The part of the stream that the client has, after which another engine continues; None if it has nothing."""
        if self._begun is None:
            return None
        tokens = zip(self._tokens, self._shown, strict=True)
        parts = [SentPart(index, bytes(each), shown, False) for index, (each, shown) in enumerate(tokens)]
        return Resumption(begun=self._begun, parts=parts, events=self._events)

    @property
    def id(self) -> str:
        """The id of the first sequence; empty until the engine's first comment."""
        return self._begun.ids[0] if self._begun is not None else ""

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can continue the stream: not after one of its sequences has ended."""
        return not self._ended

    @property
    def complete(self) -> bool:
        """Whether the client has the whole stream, so that only the end of the connection is missing."""
        return self._begun is not None and len(self._ended) == len(self._tokens)

    def begin_again(self) -> None:
        """Expect the stream of another engine."""
        self._rest, self._frames, self._renamed, self.fault = b"", [], [], ""
        self._to_skip = 2 if self._begun is not None else 0

    def take(self, chunk: bytes) -> bytes:
        """Handle a chunk of the engine's stream. Return the bytes that the client gets.

        If the chunk has a comment that cannot be read, `fault` says why, and the client gets what precedes the events
        of this comment. Take no further chunks of this engine then.
        """
        ready = list[bytes]()
        try:
            if self._created is not None and not (self._renamed or self._to_skip or self._frames or self._rest):
                passed = self._take_plain(chunk)
                if passed is not None:
                    return passed
            *frames, self._rest = (self._rest + chunk).split(END)
            for frame in frames:
                if frame.startswith(COMMENT):
                    self._comment(EVENT.decode(frame[len(COMMENT) :]), ready)
                elif frame.startswith(PLACES):
                    self.places = frame[len(PLACES) :].decode(errors="replace")
                elif frame.startswith(PINGS) and not self._frames:
                    ready.append(frame + END)
                else:
                    self._frames.append(frame + END)
        except UNREADABLE as error:
            self.fault = f"a comment of the engine cannot be read: {error}"
        return b"".join(ready)

    def _take_plain(self, chunk: bytes) -> bytes | None:
        """Handle a chunk with complete events and the comment on their tokens, without splitting it into frames.

        Almost all chunks are like that. Return the events, or None if the chunk is not like that.
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
        """Return the frames at the end of a complete stream that no comment follows, such as an error."""
        frames, self._frames = self._frames, []
        return b"".join(self._as_begun(frame) for frame in frames) + self._rest

    def _comment(self, event: Begun | TokensSent, ready: list[bytes]) -> None:
        """Handle a comment. Append the events before it to `ready`, unless the client has them.

        Raises one of UNREADABLE for a comment that no engine sends here. Then the client does not get the events.
        """
        frames, self._frames = self._frames, []
        if isinstance(event, Begun):
            self._begin(event)
        elif self._begun is None or self._to_skip == 2:
            raise ValueError("tokens were sent before the stream began")
        elif not self._to_skip:
            self._count(event)
        if self._to_skip:
            self._to_skip -= 1
        else:
            ready += (self._as_begun(frame) for frame in frames)
        if self._created is None and frames:
            self._created = first_created(frames)

    def _begin(self, event: Begun) -> None:
        if not event.ids:
            raise ValueError("a stream began without a sequence")
        if self._begun is None:
            self._begun = event
            self._tokens, self._shown = [bytearray() for _ in event.ids], [0] * len(event.ids)
            return
        ids = zip(unique_in(event.ids), unique_in(self._begun.ids), strict=False)
        self._renamed = [(other.encode(), own.encode()) for other, own in ids if other != own]

    def _count(self, event: TokensSent) -> None:
        """Count tokens that the client gets. Raises IndexError, and counts none, if a sequence does not exist."""
        for part in event.parts:
            if not 0 <= part.index < len(self._tokens):
                raise IndexError(f"there is no sequence {part.index}")
        self._events = event.events
        for part in event.parts:
            self._tokens[part.index] += part.tokens
            self._shown[part.index] = part.shown
            if part.ended:
                self._ended.add(part.index)

    def _as_begun(self, frame: bytes) -> bytes:
        """Return a frame with the ids and the creation time of the first engine."""
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
