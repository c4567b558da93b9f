"""Errors in the format of Anthropic's API, with its statuses and types."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from baton.api.errors import ApiError

PATH = "/v1/messages"
OVERLOADED = 529  # Anthropic's counterpart of 503
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# Clients recognize this wording, and then shorten the conversation.
TOO_LONG = "prompt is too long: "


class MessagesErrorDetail(Struct):
    type: str
    message: str
    details: Mapping[str, Any] | UnsetType = UNSET  # {"error_code", …}, from which clients learn how to go on


class MessagesErrorBody(Struct, tag_field="type", tag="error"):
    error: MessagesErrorDetail
    request_id: str


def is_messages(path: str) -> bool:
    """Return whether `path` belongs to Anthropic's Messages API."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(error: ApiError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def error_response(path: str, error: ApiError, request_id: str) -> web.Response:
    """Return an error as the API at this path writes it: Anthropic's or OpenAI's."""
    body, status = error.encode(), error.status
    if is_messages(path):
        body, status = msgspec.json.encode(error_body(error, request_id)), status_of(error)
    return web.Response(body=body, status=status, headers=error.headers, content_type="application/json")


def error_body(error: ApiError, request_id: str) -> MessagesErrorBody:
    status = status_of(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = MessagesErrorDetail(kind, message_of(error), error.details if error.details is not None else UNSET)
    return MessagesErrorBody(detail, request_id)


def unsupported_thread() -> ApiError:
    """Return the 400 after which Anthropic's clients send the whole conversation, without the field `thread`."""
    message = "thread is not supported: send the whole conversation in messages"
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return ApiError(400, message, "invalid_request_error", "thread", "unsupported_parameter", details=details)


def message_of(error: ApiError) -> str:
    """Return the message, including the name of the wrong field: Anthropic's errors have no separate field for it."""
    if error.code == "context_length_exceeded":
        return TOO_LONG + error.message
    named = error.param is None or error.param in error.message
    return error.message if named else f"{error.param}: {error.message}"
