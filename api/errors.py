"""Errors sent to clients: OpenAI's error object and an HTTP status."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

DRAINING = "draining"  # the code of an error that another server would not have
RETRY_QUEUE_S = 1
MAX_SHOWN = 100  # maximum characters of a client's value that an error message repeats
RETRY_UNAVAILABLE_S = 5
CLIENT_LEFT = 499
SHOULD_RETRY = "x-should-retry"  # clients of OpenAI and Anthropic, and the router, respect this header
DO_NOT_RETRY = {SHOULD_RETRY: "false"}


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None  # the wrong field of the request
    code: str | None  # the machine-readable kind of error


class ErrorBody(Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An error that is sent to the client. See ErrorDetail for `type`, `param` and `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """details: the error's details in Anthropic's format, which only its API shows."""
        super().__init__(message)
        self.status = status
        self.message = message.encode(errors="backslashreplace").decode()  # may repeat bytes that are not UTF-8
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = details

    def body(self) -> ErrorBody:
        return ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code))

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())


def websocket_event(error: ApiError) -> dict[str, Any]:
    """Return the event that shows an error to the client of a websocket."""
    return {"type": "error", "status": error.status, "error": msgspec.to_builtins(error.body().error)}


def shown(value: object) -> str:
    """Show a client's value in a message. Lists and objects are only named: `repr` could exceed the recursion limit."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:MAX_SHOWN] if isinstance(value, str) else value)[:MAX_SHOWN]


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, "invalid_request_error", param, code)


def unsupported(field: str, why: str = "is not supported") -> ApiError:
    return bad_request(f"{field} {why}", field, "unsupported_parameter")


def dead_end(message: str) -> ApiError:
    """Return the 400 for an output whose grammar cannot be followed to its end. message: where that showed, and why."""
    return bad_request(f"the output cannot follow its grammar: {message}", code="grammar_dead_end")


def unauthorized() -> ApiError:
    message = "a valid API key is required: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    return ApiError(
        401, message, "authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )


def forbidden(message: str) -> ApiError:
    return ApiError(403, message, "permission_error", code="forbidden")


def unknown_model(name: str, served: str) -> ApiError:
    message = f"the model {name!r} does not exist; this server has {served!r}"
    return ApiError(404, message, "not_found_error", "model", "model_not_found")


def unknown_session(id: str, param: str) -> ApiError:
    return ApiError(404, f"there is no session {id!r}", "not_found_error", param, "session_not_found")


def session_moved(id: str, engine: str, param: str) -> ApiError:
    return ApiError(404, f"session {id!r} has moved to engine {engine!r}", "not_found_error", param, "session_moved")


def upgrade_required() -> ApiError:
    message = "GET here opens a websocket: use POST to create a response over HTTP"
    return ApiError(426, message, "invalid_request_error", code="upgrade_required", headers={"Upgrade": "websocket"})


def queue_full(message: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_QUEUE_S)}
    return ApiError(429, message, "rate_limit_error", code="queue_full", headers=headers)


def unavailable(message: str, code: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_UNAVAILABLE_S)}
    return ApiError(503, message, "service_unavailable_error", code=code, headers=headers)


def draining() -> ApiError:
    return unavailable("the server is shutting down", DRAINING)


def loading() -> ApiError:
    return unavailable("the model is loading", "loading")


def timed_out(seconds: float) -> ApiError:
    """Return a 504 with the header that keeps OpenAI's client from retrying."""
    message = f"the request was not finished within {seconds:g} s"
    return ApiError(504, message, "timeout_error", code="request_timeout", headers=DO_NOT_RETRY)


def aborted() -> ApiError:
    return not_retryable(unavailable("the request was aborted", "aborted"))


def not_retryable(error: ApiError) -> ApiError:
    """Return `error` with a header against retries, such as of a turn that a retry would add to its session twice."""
    headers = {name: value for name, value in error.headers.items() if name != "Retry-After"} | DO_NOT_RETRY
    return ApiError(error.status, error.message, error.type, error.param, error.code, headers, error.details)


def client_left() -> ApiError:
    """Return the error that ends a generation whose client has disconnected. Its code goes to logs and metrics only."""
    return ApiError(CLIENT_LEFT, "the client has left", "client_error", code="client_left")


def internal(message: str) -> ApiError:
    return ApiError(500, message, "server_error", code="internal_error")


def from_status(status: int, reason: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """Return the error for a status that aiohttp itself answers: unknown path, wrong method, body too large."""
    kind = "not_found_error" if status == 404 else "invalid_request_error" if status < 500 else "server_error"
    codes = {404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}
    return ApiError(status, reason, kind, code=codes.get(status), headers=headers)
