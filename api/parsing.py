"""Parsing of request bodies: JSON into Structs, with errors that name the wrong field."""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from baton.api import errors
from baton.api.connections.body import whole_body

T = TypeVar("T")
Unsupported: TypeAlias = Mapping[str, tuple[Any, ...]]  # refused fields, each with the values that are accepted anyway
NOTHING: Unsupported = {}
MAX_DIGITS = 10
MAX_STREAM_ID = 256  # characters


RESUME = "baton_resume"
"""The field that a router adds to the body of a request whose stream another engine has begun: see api/resuming.py."""
RESUMPTION: web.RequestKey[object] = web.RequestKey("resumption", object)


def read_event(data: str | bytes) -> dict[str, Any]:
    """Decode an event from a websocket's client. Raises ApiError 400."""
    try:
        event = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise errors.bad_request(f"the event is not valid JSON: {error}") from None
    if not isinstance(event, dict):
        raise errors.bad_request("an event must be a JSON object")
    return event


def read_stream_id(event: dict[str, Any]) -> str | None:
    """Remove the name of an event's stream from the event, and return it; None without a name. Raises ApiError 400."""
    stream_id = event.pop("stream_id", None)
    if stream_id is not None and not (isinstance(stream_id, str) and 0 < len(stream_id) <= MAX_STREAM_ID):
        message = f"stream_id must be a string of 1 to {MAX_STREAM_ID} characters"
        raise errors.bad_request(message, "stream_id", "invalid_value")
    return stream_id


async def read_object(request: web.Request) -> dict[str, Any]:
    """Read the body as a JSON object. Top-level nulls are dropped: null means that a field is absent.

    Raises ApiError 400 if the body is not a JSON object, and the exceptions of `whole_body`.
    """
    async with whole_body(request) as body:
        try:
            value = msgspec.json.decode(body) if body else {}
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise errors.bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise errors.bad_request("the body must be a JSON object")
    if RESUME in value:
        request[RESUMPTION] = value.pop(RESUME)
    return {name: item for name, item in value.items() if item is not None}


def convert(
    value: Mapping[str, Any],
    kind: type[T],
    ignored: frozenset[str] = frozenset(),
    unsupported: Unsupported = NOTHING,
    at: str = "",
) -> T:
    """Convert `value` to the Struct `kind`. Raises ApiError 400, which names the wrong field.

    ignored: fields that are dropped.
    unsupported: fields that are not implemented and refused, each with the values that are accepted, as without effect.
    at: path of `value` in the body, for error messages.
    """
    for name, item in value.items():
        if name in unsupported and item not in unsupported[name]:
            raise errors.unsupported(f"{at}.{name}" if at else name)
    known = {name: item for name, item in value.items() if name not in ignored and name not in unsupported}
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error), at) from None


def read_number(query: Mapping[str, str], name: str, what: str) -> int | None:
    """Read a number from the query; None if absent. Raises ApiError 400. what: the valid numbers, for the message."""
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise errors.bad_request(f"{name} must be {what}", name, "invalid_value")
    return int(text)


def invalid(message: str, at: str) -> errors.ApiError:
    """Turn the message of a msgspec.ValidationError into an ApiError that names the field. at: path of the value."""
    if unknown := re.search(r"unknown field `([^`]*)`", message):
        place = place_in(message)
        field = ".".join(part for part in (at, place, unknown[1]) if part)
        return errors.bad_request(f"unknown or unsupported field {field!r}", field, "unknown_parameter")
    if missing := re.search(r"missing required field `([^`]*)`", message):
        field = ".".join(part for part in (at, place_in(message), missing[1]) if part)
        return errors.bad_request(f"{field} is required", field, "missing_required_parameter")
    place = place_in(message)
    field = ".".join(part for part in (at, place) if part)
    text = message.partition(" - at ")[0]
    return errors.bad_request(f"{field}: {text}" if field else text, field or None, "invalid_value")


def place_in(message: str) -> str:
    """Return `messages[0].content` from a msgspec error that ends in `$.messages[0].content`."""
    match = re.search(r"`\$\.?([^`]*)`$", message)
    return match[1] if match else ""
