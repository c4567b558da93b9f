"""Streams of server-sent events. The HTTP status is sent late, so that refusals still get their own status."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

import msgspec
import structlog
from aiohttp import web

from baton.actors.requests import Output
from baton.api import errors
from baton.api.errors import DRAINING, ApiError
from baton.api.exchange import STREAM_ERROR
from baton.api.generation.outputs import Generation
from baton.api.resuming import RESUMABLE, ROUTED, begun, passed
from baton.api.server import SERVER

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


Save: TypeAlias = Callable[[], Awaitable[None]]  # waits until the answer is saved; raises ApiError if that fails


class Encoder(Protocol):
    """An encoder of the ring's outputs as events in the format of one endpoint."""

    def opening(self) -> Sequence[object]:
        """Return the events before any output."""
        ...

    def delta(self, index: int, output: Output) -> Sequence[object]:
        """Return the events for an output of the generation's request `index`."""
        ...

    def closing(self) -> Sequence[object]:
        """Return the events after the last output."""
        ...


def frames(events: Sequence[object]) -> bytes:
    """Encode events as SSE frames with data only, without event names."""
    return b"".join([b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])


@dataclass(frozen=True)
class Framing:
    """The functions and constants with which an API writes its stream."""

    frames: Callable[[Sequence[object]], bytes] = frames  # encodes events as bytes
    error: Callable[[ApiError], object] = ApiError.body  # makes an event from an error
    ping: bytes = PING  # sent after `ping_interval` seconds without events
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
    """Answer with a stream of the events of `generation`.

    Send the status after the first output, or after `ping_interval` seconds. Raises an ApiError that occurs before the
    status; a later ApiError becomes an event. Raises ConnectionResetError if the client has disconnected.

    save: awaited before the last events are sent; if it raises an ApiError, the error becomes a further event, in
    OpenAI's format.
    """
    is_routed = ROUTED in request.headers
    batch = await generation.next(ping_interval)
    note = passed(generation, batch) if is_routed else b""
    response = web.StreamResponse(headers=HEADERS | ({RESUMABLE: "1"} if is_routed else {}))
    await response.prepare(request)
    try:
        model = request.app[SERVER].loaded()
        await response.write(framing.frames(encoder.opening()) + (begun(model, generation) if is_routed else b""))
        while True:
            events = [event for index, output in batch for event in encoder.delta(index, output)]
            if generation.finished:
                closing = encoder.closing()
                last = [*events, *closing, *await try_save(request, save)]
                await response.write(framing.frames(last) + framing.end + note)
                break
            await response.write(framing.frames(events) + note if batch else framing.ping)
            batch = await generation.next(ping_interval)
            note = passed(generation, batch) if is_routed else b""
    except ApiError as error:
        if is_routed and error.code == DRAINING and save is nothing_to_save:
            leave_to_router(request)
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


def leave_to_router(request: web.Request) -> NoReturn:
    """Break a stream off, so that the router lets another engine continue it. Raises ConnectionResetError."""
    request[STREAM_ERROR] = DRAINING
    if request.transport is not None:
        request.transport.close()
    raise ConnectionResetError("another engine continues the stream")


async def try_save(request: web.Request, save: Save) -> list[object]:
    """Await `save`. If it raises an ApiError, record the error's code for the log, and return the error as an event."""
    try:
        await save()
    except ApiError as error:
        request[STREAM_ERROR] = error.code or error.type
        return [error.body()]
    return []
