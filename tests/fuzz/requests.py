"""Requests by seed: `draw(seed, number)` returns the same request each time."""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from baton.api.admin import AbortRequest
from baton.api.anthropic.request import MessagesRequest
from baton.api.openai.chat import ChatRequest
from baton.api.openai.completions import CompletionRequest
from baton.api.openai.embeddings import EmbeddingRequest
from baton.api.responses.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from baton.api.responses.request import ResponseRequest
from baton.api.responses.websocket import ResumeRequest
from baton.api.sessions.routes import CreateRequest, ForkRequest, MoveRequest, RewindRequest
from baton.api.sessions.turns import TurnRequest
from baton.api.sglang.sessions import CloseSessionRequest, OpenSessionRequest
from baton.api.tokenization import DetokenizeRequest, TokenizeRequest
from tests.fuzz.json_text import break_text, repeat_key, to_json
from tests.fuzz.shapes import KNOWN_RESPONSE, LIKELY, ONE_OF, SELDOM, SESSIONS, SHAPES, VOCAB, Create, Generate
from tests.fuzz.values import Values


@dataclass(frozen=True)
class Endpoint:
    """A route, and what to draw for its requests."""

    method: str
    path: str
    body: type[Struct] | None = None  # the Struct that the handler decodes the body into
    weight: int = 1  # how often this endpoint is drawn, relative to the others
    query: tuple[str, ...] = ()  # the query parameters that the handler reads
    event: str = ""  # the type of the websocket event; empty for a plain HTTP request


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", ChatRequest, 8),
    Endpoint("POST", "/v1/completions", CompletionRequest, 8),
    Endpoint("POST", "/v1/embeddings", EmbeddingRequest, 4),
    Endpoint("POST", "/v1/responses", ResponseRequest, 6),
    Endpoint("POST", "/generate", Generate, 10),
    Endpoint("POST", "/v1/messages", MessagesRequest, 6),
    Endpoint("POST", "/v1/messages/count_tokens", MessagesRequest, 2),
    Endpoint("POST", "/v1/sessions/{session}/turns", TurnRequest, 6),
    Endpoint("GET", "/v1/responses", Create, 3, event="response.create"),
    Endpoint("GET", "/v1/responses", ResumeRequest, event="response.resume"),
    Endpoint("GET", "/v1/responses", ResumeRequest, event="response.cancel"),
    Endpoint("POST", "/v1/sessions", CreateRequest, 2),
    Endpoint("POST", "/v1/sessions/{session}/fork", ForkRequest, 2),
    Endpoint("POST", "/v1/sessions/{session}/rewind", RewindRequest, 2),
    Endpoint("POST", "/v1/sessions/{session}/suspend"),
    Endpoint("POST", "/v1/sessions/{session}/move", MoveRequest),
    Endpoint("GET", "/v1/sessions/{session}"),
    Endpoint("DELETE", "/v1/sessions/{closing}", query=("after",)),
    Endpoint("GET", "/v1/sessions"),
    Endpoint("POST", "/open_session", OpenSessionRequest, 2),
    Endpoint("POST", "/close_session", CloseSessionRequest),
    Endpoint("POST", "/tokenize", TokenizeRequest, 2),
    Endpoint("POST", "/detokenize", DetokenizeRequest, 2),
    Endpoint("POST", "/abort_request", AbortRequest),
    Endpoint("POST", "/flush_cache"),
    Endpoint("GET", "/v1/responses/{response}", query=("stream", "starting_after")),
    Endpoint("GET", "/v1/responses/{response}/input_items", None, 2, query=("limit", "order", "after")),
    Endpoint("POST", "/v1/responses/{response}/cancel"),
    Endpoint("DELETE", "/v1/responses/{response}"),
    Endpoint("POST", "/v1/responses/input_tokens", ResponseRequest),
    Endpoint("POST", "/v1/conversations", ConversationRequest),
    Endpoint("GET", "/v1/conversations/{conversation}"),
    Endpoint("POST", "/v1/conversations/{conversation}", MetadataRequest),
    Endpoint("DELETE", "/v1/conversations/{closing}"),
    Endpoint("GET", "/v1/conversations/{conversation}/items", query=("limit", "order", "after")),
    Endpoint("POST", "/v1/conversations/{conversation}/items", ItemsRequest),
    Endpoint("GET", "/v1/conversations/{conversation}/items/{item}"),
    Endpoint("DELETE", "/v1/conversations/{conversation}/items/{item}"),
    Endpoint("GET", "/v1/chat/completions/{completion}"),
    Endpoint("GET", "/v1/chat/completions/{completion}/messages"),
    Endpoint("GET", "/debug/peers"),
    Endpoint("GET", "/debug/slots", query=("session",)),
    Endpoint("GET", "/debug/tree"),
    Endpoint("GET", "/v1/models/{model}"),
    Endpoint("GET", "/v1/models"),
    Endpoint("GET", "/model_info"),
    Endpoint("GET", "/server_info"),
    Endpoint("GET", "/tokenizer_info"),
    Endpoint("GET", "/health"),
    Endpoint("GET", "/health_generate"),
    Endpoint("GET", "/metrics"),
)

PATH_VALUES = {
    "session": SESSIONS,
    "conversation": SESSIONS,
    "closing": ("s3", "a", "d_1"),
    "response": (KNOWN_RESPONSE,),
    "item": ("msg-0",),
    "completion": ("chatcmpl-0",),
    "model": ("default",),
}
ODD_IDS = ("", ".", "..", "a/b", "a" * 300, "é", "\x00", "٣", "%", "a b", '"', "nobody")
ODD_QUERIES = (
    "",
    "0",
    "1",
    "-1",
    "+1",
    "²",
    "٣",
    "1.0",
    "1e3",
    "9" * 5000,
    "true",
    "desc",
    "asc",
    "%ff",
    "%00",
    "a b",
    "null",
)
ODD_BYTES = (b"", b"\xff\xfe", b"\xc3\xa9", b"a" * 4000, b'"', b"'", b"*", b"null", b"\xed\xa0\x80")
HEADERS = (
    b"Host", b"Origin", b"Content-Type", b"Content-Encoding", b"traceparent", b"Authorization", b"Accept", b"Expect",
    b"Cookie", b"Access-Control-Request-Method", b"Sec-Fetch-Site", b"Range", b"If-None-Match", b"X-Request-Id",
    b"Sec-WebSocket-Protocol", b"X-Api-Key", b"Anthropic-Version",
)  # fmt: skip
LIKELY_HEADERS = {
    b"Host": (b"localhost", b"[::1]", b"127.0.0.1:99999", b"evil.example"),
    b"Origin": (b"null", b"https://evil.example", b"http://localhost"),
    b"Content-Type": (b"text/plain", b"application/json; charset=utf-16", b"multipart/form-data; boundary=x", b"a"),
    b"Content-Encoding": (b"gzip", b"deflate", b"br", b"zstd", b"identity", b"gzip, br", b"GZIP"),
    b"traceparent": (b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-zz"),
}
NO_METHOD = "FUZZ"
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", NO_METHOD)


@dataclass(frozen=True)
class FuzzRequest:
    """A request as it is sent to the server."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    event: bool = False  # whether the body is sent as a websocket message
    leaves: int | None = None  # the client disconnects after this many bytes of the answer

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


def draw(seed: int, number: int, endpoints: Sequence[Endpoint] = ENDPOINTS) -> FuzzRequest:
    """Draw request `number` of the seed."""
    random = Random(f"{seed} {number}")
    [endpoint] = random.choices(endpoints, [each.weight for each in endpoints])
    method = endpoint.method if random.random() < 0.98 else random.choice(METHODS)
    target = draw_target(random, endpoint)
    headers, body = draw_headers(random, draw_body(random, endpoint))
    if method != endpoint.method or target.partition("?")[0] != endpoint.path:
        # Drop the Expect header: without a route aiohttp itself answers it, in a form that is not the api's.
        headers = tuple(each for each in headers if each[0] != b"Expect")
    leaves = random.choice([0, 1, 200, 2000]) if random.random() < 0.04 and not endpoint.event else None
    return FuzzRequest(method, target, headers, body, bool(endpoint.event), leaves)


def seldom(random: Random, fields: dict[str, Any]) -> None:
    """Remove grammar fields in nine of ten requests: a random text is rarely a valid grammar, and its error would hide
    those of all other fields.
    """
    for name in sorted(SELDOM & fields.keys()):
        if random.random() < 0.9:
            del fields[name]


def draw_body(random: Random, endpoint: Endpoint) -> bytes:
    """Draw a body. Usually one field is hostile and all others are valid."""
    if endpoint.body is None:
        return b"" if random.random() < 0.7 else random.choice(ODD_BYTES)
    values = Values(random, VOCAB, SHAPES, LIKELY, ONE_OF)
    hostile = random.choices([0, 1, 2, 5], [4, 12, 3, 1])[0]
    fields = values.body(endpoint.body, hostile)
    for part in (fields, fields.get("sampling_params")):
        if isinstance(part, dict):
            seldom(random, part)
    if "abort_all" in fields and fields["abort_all"] is True:  # True would abort the canary's requests too.
        fields["abort_all"] = False
    if endpoint.event:
        fields = {"type": endpoint.event} | fields
    text = to_json(fields)
    if random.random() < 0.04:
        text = repeat_key(text, random.choice([*fields, "model"]), values.wrong(), random)
    return break_text(text, random) if random.random() < 0.06 else text.encode("utf-8", "surrogatepass")


def draw_target(random: Random, endpoint: Endpoint) -> str:
    target = endpoint.path
    for name, likely in PATH_VALUES.items():
        value = random.choice(likely if random.random() < 0.85 else ODD_IDS)
        target = target.replace(f"{{{name}}}", quote(value, safe=""))
    if endpoint.query and random.random() < 0.7:
        names = random.sample(endpoint.query, random.randint(1, len(endpoint.query)))
        target += "?" + "&".join(f"{name}={quote(random.choice(ODD_QUERIES), safe='%')}" for name in names)
    if random.random() < 0.01:
        target += random.choice(["/", "//", "?", "?a=%ff&b", "#x", "%2f..%2f"])
    return target


def draw_headers(random: Random, body: bytes) -> tuple[tuple[tuple[bytes, bytes], ...], bytes]:
    """Draw headers, and return them with the body, which may not be encoded as the headers say."""
    headers = [(b"Content-Type", b"application/json")]
    if random.random() < 0.12:
        name = random.choice(HEADERS)
        value = random.choice((*LIKELY_HEADERS.get(name, (b"x",)), random.choice(ODD_BYTES)))
        headers = [each for each in headers if each[0] != name] + [(name, value)]
        if name == b"Content-Encoding" and random.random() < 0.7:
            packed = gzip.compress(body, mtime=0)
            body = random.choice([packed, zlib.compress(body), packed[:-9]])
    return tuple(headers), body
