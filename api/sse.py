"""Server-sent events: opening late enough for a refusal to be a status, and errors afterwards as events."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
import structlog
from aiohttp import web

from baton.actors.requests import Output
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.exchange import STREAM_ERROR
from baton.api.generation.outputs import Generation

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


Save: TypeAlias = Callable[[], Awaitable[None]]


class Encoder(Protocol):
    """Turns outputs into the events of one endpoint."""

    def opening(self) -> Sequence[object]: ...

    def delta(self, index: int, output: Output) -> Sequence[object]: ...

    def closing(self) -> Sequence[object]: ...


def frames(events: Sequence[object]) -> bytes:
    return b"".join([b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])


@dataclass(frozen=True)
class Framing:
    """How a protocol writes a stream: its events, one that tells an error, a sign of life, and its end."""

    frames: Callable[[Sequence[object]], bytes] = frames
    error: Callable[[ApiError], object] = ApiError.body
    ping: bytes = PING
    end: bytes = DONE


DATA_ONLY = Framing()


async def nothing_to_save() -> None:
    pass


async def stream(
    request: web.Request,
    generation: Generation,
    encoder: Encoder,
    ping_interval: float,
    save: Save = nothing_to_save,
    framing: Framing = DATA_ONLY,
) -> web.StreamResponse:
    """Answer with the events of `generation`.

    save: awaited before the last of them; an ApiError that it raises becomes one more, as OpenAI's protocols have it.

    Waits for its first output, or `ping_interval` seconds, before the status goes out: an ApiError until then is
    raised, later it becomes an event. Raises ConnectionResetError if the client is gone.
    """
    batch = await generation.next(ping_interval)
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    try:
        await response.write(framing.frames(encoder.opening()))
        while True:
            events = [event for index, output in batch for event in encoder.delta(index, output)]
            if generation.finished:
                closing = encoder.closing()
                last = [*events, *closing, *await try_save(request, save)]
                await response.write(framing.frames(last) + framing.end)
                break
            await response.write(framing.frames(events) if batch else framing.ping)
            batch = await generation.next(ping_interval)
    except ApiError as error:
        unsaved = await try_save(request, save)
        request[STREAM_ERROR] = error.code or error.type
        await response.write(framing.frames([framing.error(error), *unsaved]) + framing.end)
    except ConnectionError:
        raise
    except Exception:
        structlog.get_logger().exception("a stream failed")
        request[STREAM_ERROR] = "internal_error"
        failure = errors.internal("the server failed to encode the answer")
        await response.write(framing.frames([framing.error(failure)]) + framing.end)
    return response


async def try_save(request: web.Request, save: Save) -> list[object]:
    """Await `save`. Returns the ApiError that it raised, as an event, and notes it for the log line."""
    try:
        await save()
    except ApiError as error:
        request[STREAM_ERROR] = error.code or error.type
        return [error.body()]
    return []
