"""Server-sent events. The status is sent late enough for refusals to have one; later errors are events."""

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


Save: TypeAlias = Callable[[], Awaitable[None]]  # waits until the answer is saved; raises ApiError if it cannot be


class Encoder(Protocol):
    """Encoder of outputs as the events of one endpoint."""

    def opening(self) -> Sequence[object]:
        """Return the events before any output."""
        ...

    def delta(self, index: int, output: Output) -> Sequence[object]:
        """Return the events for an output of member `index`."""
        ...

    def closing(self) -> Sequence[object]:
        """Return the events after the last output."""
        ...


def frames(events: Sequence[object]) -> bytes:
    """Encode events that have data only, no names."""
    return b"".join([b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])


@dataclass(frozen=True)
class Framing:
    """The way in which a protocol writes a stream."""

    frames: Callable[[Sequence[object]], bytes] = frames  # encodes events
    error: Callable[[ApiError], object] = ApiError.body  # makes an event of an error
    ping: bytes = PING  # sent after `ping_interval` without events
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

    Waits for the first output, or `ping_interval` seconds, before the status is sent. An ApiError before that is
    raised; later it becomes an event. Raises ConnectionResetError if the client is gone.

    save: awaited before the last events are sent; an ApiError that it raises becomes one more event, in OpenAI's form.
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
    """Await `save`. If it raises an ApiError, note that for the log line, and return it as an event."""
    try:
        await save()
    except ApiError as error:
        request[STREAM_ERROR] = error.code or error.type
        return [error.body()]
    return []
