"""Places: positions and digests at which a request left states. An engine adds them to its answer for the router."""

from aiohttp import web

from baton.actors.runtime.digests import Digester
from baton.actors.tokens import count
from baton.api.generation.outputs import Generation

HEADER = "baton-places"  # the header with the places, in complete answers
END = b"\n\n"  # end of an event or comment of a stream
PLACES = b": places "  # beginning of the comment with the places, the last one of a stream
DIGESTER = web.AppKey("digester", Digester)


def places_of(generation: Generation, digester: Digester) -> str:
    """Return `LENGTH POSITION:DIGEST POSITION:DIGEST …` for the first member of a generation.

    LENGTH is the number of prompt tokens. The positions are those at which a state may be: the end of the cached part
    of the prompt, the end of the part that the cache knew, the end of the prompt, and the end of the answer. The model
    may not have read the last token of the answer, so the position before it is one too.
    """
    member = generation.members[0]
    request, output = member.request, bytes(member.delivered)
    length, end = count(request.tokens), count(request.tokens) + count(output)
    digests = digester.extended(digester.beginning(request.salt), 0, request.tokens + output)
    positions = sorted({member.cached_tokens, member.matched_tokens, length, end - 1, end})
    places = (f"{position}:{int(digests[position - 1]):016x}" for position in positions if position)
    return " ".join((str(length), *places))


def split_places(chunk: bytes) -> tuple[bytes, str]:
    """Return a chunk of a stream without the comment with the places, and the places; "" if there is no comment.

    An event's text cannot be mistaken for the comment: the comment follows a newline, which JSON escapes.
    """
    if chunk.startswith(PLACES):
        return b"", chunk[len(PLACES) :].decode(errors="replace")
    events, comment, places = chunk.rpartition(END + PLACES)
    return (events + END, places.decode(errors="replace")) if comment else (chunk, "")


def read_places(text: str) -> tuple[int, list[tuple[int, int]]]:
    """Parse the result of `places_of`. Return the length, and pairs (position, digest). Raises ValueError."""
    length, *places = text.split()
    pairs = (place.partition(":") for place in places)
    return int(length), [(int(position), int(digest, 16)) for position, _, digest in pairs]
