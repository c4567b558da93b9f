"""The places where states of a request and of its answer lie, which an engine adds to an answer for a router."""

from aiohttp import web

from baton.actors.runtime.digests import Digester
from baton.actors.tokens import count
from baton.api.generation.outputs import Generation

HEADER = "baton-places"  # the header of complete answers
END = b"\n\n"  # of an event or comment
PLACES = b": places "  # begins the comment at the end of a stream
DIGESTER = web.AppKey("digester", Digester)


def places_of(generation: Generation, digester: Digester) -> str:
    """Return the length of the first member's prompt, and the positions and digests where its states may lie.

    They are how far the prompt was cached, and how far it was known; the end of the prompt; and the end of the answer
    with and without its last token, which the model may not have read: `LENGTH POSITION:DIGEST POSITION:DIGEST …`.
    """
    member = generation.members[0]
    request, output = member.request, bytes(member.delivered)
    length, end = count(request.tokens), count(request.tokens) + count(output)
    digests = digester.extended(digester.beginning(request.salt), 0, request.tokens + output)
    positions = sorted({member.cached_tokens, member.matched_tokens, length, end - 1, end})
    places = (f"{position}:{int(digests[position - 1]):016x}" for position in positions if position)
    return " ".join((str(length), *places))


def split_places(chunk: bytes) -> tuple[bytes, str]:
    """Return a chunk of a stream without the comment that ends the stream, and what that says; "" if there is none.

    Texts of events may have the same characters, but not after an end of a line, which is escaped in JSON.
    """
    if chunk.startswith(PLACES):
        return b"", chunk[len(PLACES) :].decode(errors="replace")
    events, comment, places = chunk.rpartition(END + PLACES)
    return (events + END, places.decode(errors="replace")) if comment else (chunk, "")


def read_places(text: str) -> tuple[int, list[tuple[int, int]]]:
    """Read what `places_of` returns: the length, and pairs (position, digest). Raises ValueError."""
    length, *places = text.split()
    pairs = (place.partition(":") for place in places)
    return int(length), [(int(position), int(digest, 16)) for position, _, digest in pairs]
