"""The HTTP client of `baton chat`: calls on sessions, and turns as streams of events."""

import json
import time
from collections.abc import Generator
from contextlib import closing
from http.client import HTTPException
from typing import Any, TypeAlias, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

import msgspec
from msgspec import Struct

DEFAULT_URL = "http://127.0.0.1:8000"
TURN_TIMEOUT_S = 600
CALL_TIMEOUT_S = 30
SETTLE_S = 10  # maximum wait for the end of an interrupted turn
POLL_S = 0.05

T = TypeVar("T")


class ChatError(Exception):
    """A failed call, with a message for the user. status: HTTP status, 0 without an answer. code: error code."""

    def __init__(self, message: str, status: int = 0, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class StateInfo(Struct):
    """The tier of a session's state, and how many tokens the state has consumed."""

    tier: str
    position: int


class TurnInfo(Struct):
    """A turn that has ended."""

    turn: int  # the turn's number
    status: str
    position: int  # length of the session's history after the turn, in tokens
    input_tokens: int
    output_tokens: int
    messages: list[dict[str, Any]] | None  # None if the input was text or tokens
    text: str | None  # text of the answer; None if the model only read the input


class SessionInfo(Struct):
    """A session. Times are Unix times."""

    id: str
    turn: int  # number of the last turn that has ended; 0 before the first turn
    position: int  # length of the history, in tokens
    status: str  # "idle" or "busy"
    created_at: int
    last_turn_at: int | None = None
    state: StateInfo | None = None
    turns: list[TurnInfo] = []  # empty in a list of sessions


class SessionList(Struct):
    data: list[SessionInfo]


class PromptCounts(Struct):
    cached_tokens: int


class UsageInfo(Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptCounts


class StartEvent(Struct, tag_field="type", tag="turn.started"):
    turn: int


class TextEvent(Struct, tag_field="type", tag="turn.delta"):
    text: str


class EndEvent(Struct, tag_field="type", tag="turn.ended"):
    turn: int
    status: str
    position: int
    finish_reason: str | None
    usage: UsageInfo
    resumed_from: str = ""  # tier of the state from which the turn resumed
    lost: str = ""  # why more tokens of the history were computed again than necessary; empty if not


Event: TypeAlias = StartEvent | TextEvent | EndEvent


class ChatClient:
    """A client of one server. Every method raises ChatError if its call fails."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Return the name of the served model."""
        models = self._call("GET", "/v1/models", dict[str, Any])
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ChatError(f"{self.url} lists no model") from None

    def create(self) -> SessionInfo:
        return self._call("POST", "/v1/sessions", SessionInfo, {})

    def sessions(self) -> list[SessionInfo]:
        """List the sessions, most recently used first."""
        return self._call("GET", "/v1/sessions", SessionList).data

    def session(self, id: str) -> SessionInfo:
        """Fetch a session with its turns."""
        return self._call("GET", path_of(id), SessionInfo)

    def settled(self, id: str) -> SessionInfo:
        """Fetch a session as soon as its turn is over, or after SETTLE_S seconds even if the turn still runs."""
        deadline = time.monotonic() + SETTLE_S
        while (session := self.session(id)).status == "busy" and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return session

    def fork(self, id: str, turn: int | None, after: int) -> SessionInfo:
        return self._call("POST", f"{path_of(id)}/fork", SessionInfo, {"turn": turn, "after": after})

    def rewind(self, id: str, turn: int, after: int) -> SessionInfo:
        return self._call("POST", f"{path_of(id)}/rewind", SessionInfo, {"turn": turn, "after": after})

    def close(self, id: str, after: int) -> None:
        self._call("DELETE", f"{path_of(id)}?after={after}", dict[str, Any])

    def turn(self, id: str, body: dict[str, Any]) -> Generator[Event, None, None]:
        """Send a turn and yield its events as they arrive. Closing the generator aborts the turn."""
        ended = False
        with self._open("POST", f"{path_of(id)}/turns", body | {"stream": True}, TURN_TIMEOUT_S) as response:
            try:
                for line in response:
                    if line.startswith(b"data: {"):
                        event = read_event(line[len(b"data: ") :])
                        ended = ended or isinstance(event, EndEvent)
                        yield event
            except (OSError, HTTPException) as error:
                if not ended:
                    raise ChatError(f"the connection broke: {error}") from None
        if not ended:
            raise ChatError("the server disconnected in mid-answer")

    def _call(self, method: str, path: str, type: type[T], body: dict[str, Any] | None = None) -> T:
        with closing(self._open(method, path, body, CALL_TIMEOUT_S)) as response:
            try:
                return msgspec.json.decode(response.read(), type=type)
            except msgspec.DecodeError as error:
                raise ChatError(f"{self.url} does not answer like Baton: {error}") from None
            except (OSError, HTTPException) as error:
                raise ChatError(f"the connection broke: {error}") from None

    def _open(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        try:
            return urlopen(Request(self.url + path, data, self._headers, method=method), timeout=timeout)
        except HTTPError as error:
            with error:
                raise refusal(error) from None
        except (URLError, OSError, HTTPException, ValueError) as error:
            raise ChatError(f"cannot reach {self.url}: {getattr(error, 'reason', error)}") from None


def path_of(id: str) -> str:
    return f"/v1/sessions/{quote(id, safe='')}"


def read_event(data: bytes) -> Event:
    """Decode an event of a turn. Raises ChatError for an error event, and for data that is no event."""
    try:
        event = msgspec.json.decode(data)
        if "error" in event:
            raise ChatError(str(event["error"]["message"]), code=event["error"]["code"])
        converted: Event = msgspec.convert(event, Event)
        return converted
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ChatError(f"the answer cannot be read: {error}") from None


def refusal(error: HTTPError) -> ChatError:
    """Return a ChatError with the message of the answer's error object, or else with the status line."""
    try:
        detail = json.loads(error.read())["error"]
        return ChatError(str(detail["message"]), error.code, detail["code"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return ChatError(f"{error.code} {error.reason}", error.code)
