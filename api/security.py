"""Access control: checks of Host and Origin, against foreign web pages, and checks of API keys."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import unquote

from aiohttp import web

from baton.api import errors
from baton.api.config import Config, ConfigError

PAGE = "/"
PROBES = frozenset({"/health", "/ready"})
KEYLESS = PROBES | {PAGE}  # paths that need no API key
ADMINISTRATIVE = frozenset({"/v1/events", "/flush_cache", "/pause_generation", "/continue_generation"})
"""Paths that show digests of all keys' prompts, or change all keys' requests: only the first key may use them."""
WEB = ("http", "https")
MOST_KEY_BYTES = 1 << 20  # maximum size of a file with keys
SUBPROTOCOL = "responses"
# Prefix of the websocket subprotocol in which a web page sends its API key, as OpenAI's clients do.
KEY_SUBPROTOCOL = "openai-insecure-api-key."
CORS_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Expose-Headers": "request-id, x-request-id, x-trace-id, retry-after",
    "Access-Control-Max-Age": "600",
}
CORS_ORIGIN: web.RequestKey[str] = web.RequestKey("cors_origin", str)  # the allowed origin of a cross-origin request
OWNER: web.RequestKey[bytes] = web.RequestKey("owner", bytes)  # digest of the API key
FLOW: web.RequestKey[str] = web.RequestKey("flow", str)  # flow of the API key, if the server has several


def accepted_keys(config: Config) -> tuple[str, ...]:
    """Return the keys of --api-key and --api-key-file. Raises ConfigError if the file is unreadable or has none."""
    if config.api_key_file is None:
        return config.api_key
    try:
        lines = [line.strip() for line in re.split(r"\r\n?|\n", read_small(config.api_key_file).decode("utf-8-sig"))]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file: {config.api_key_file} holds no key")
    return config.api_key + keys


def read_small(file: str) -> bytes:
    """Return the content of a file with keys, or of a pipe. Raises OSError, or ValueError if it is large or endless."""
    with open(file, "rb") as opened:
        data = opened.read(MOST_KEY_BYTES + 1)
    if len(data) > MOST_KEY_BYTES:
        raise ValueError(f"{file} has more than {MOST_KEY_BYTES} bytes")
    return data


class Guard:
    """The checks of a request's headers, which every request must pass before its body is read."""

    def __init__(self, config: Config) -> None:
        self._keys = [digest(key) for key in accepted_keys(config)]
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.cors)
        self._hosts = frozenset(host.lower() for host in (*config.allowed_host, config.host))

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def admit(self, request: web.Request) -> None:
        """Raise ApiError 403 for a foreign Host or Origin, 401 without a valid API key, and 403 for the wrong one.

        Preflight requests need no key, because browsers send none with them.
        """
        if request.path not in PROBES:
            self._check_host(request)
        self._check_origin(request)
        if request.path not in KEYLESS and request.method != "OPTIONS":
            self._check_key(request)
        if request.path in ADMINISTRATIVE and request.method != "OPTIONS":
            self.check_operator(request)

    def check_operator(self, request: web.Request) -> None:
        """Raise ApiError 403 if the server has API keys and the request does not have the first one, the operator's."""
        if self._keys and owner_of(request) != self._keys[0]:
            raise errors.forbidden("only the first API key may see or change what concerns all keys")

    def _check_host(self, request: web.Request) -> None:
        """Raise ApiError 403 for an unknown host name, against DNS rebinding.

        A foreign page can make its own host name resolve to this server, but not an IP address or localhost.
        """
        name = host_name(request.headers.get("Host", ""))
        if not ("*" in self._hosts or name in self._hosts or is_local_name(name) or is_address(name)):
            raise errors.forbidden(f"unknown host name {name!r}: allow it with --allowed-host {name}")

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if origin is None:
            # Requests of a page outside CORS (an image, a prefetch) have this header, but no Origin.
            foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
            if foreign and "*" not in self._origins and not follows_link(request):
                raise errors.forbidden("cross-origin requests are refused: allow them with --cors")
            return
        if "*" in self._origins or origin.lower() in self._origins:
            request[CORS_ORIGIN] = origin
        # Accept the page's own origin with either scheme, because a proxy may terminate TLS.
        elif origin.lower() not in {f"{scheme}://{request.headers.get('Host', '')}".lower() for scheme in WEB}:
            raise errors.forbidden(f"requests from pages at {origin} are refused: allow them with --cors {origin}")

    def accepts(self, owner: bytes) -> bool:
        """Return whether an owner's requests pass: with the API key of this digest, or (b"") without a key."""
        return owner in self._keys if self._keys else owner == b""

    def _check_key(self, request: web.Request) -> None:
        if not self._keys:
            return
        key = presented_key(request)
        if key is None or not matches(digest(key), self._keys):
            raise errors.unauthorized()
        request[OWNER] = digest(key)
        if len(self._keys) > 1:
            request[FLOW] = digest(key).hex()


GUARD = web.AppKey("guard", Guard)


def presented_key(request: web.Request) -> str | None:
    """Return the API key of a request, or None if there is none or more than one.

    The key is in `Authorization: Bearer`, or without this header in `x-api-key`, as Anthropic's clients send it. A web
    page cannot set the headers of a websocket, so there the key may also be a subprotocol, %-encoded.
    """
    header = request.headers.get("Authorization")
    if header is not None:
        scheme, _, key = header.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    plain = request.headers.get("x-api-key")
    if plain is not None:
        return plain.strip()
    if request.headers.get("Upgrade", "").lower() != "websocket":
        return None
    offered = subprotocols(request)
    keys = [name.removeprefix(KEY_SUBPROTOCOL) for name in offered if name.startswith(KEY_SUBPROTOCOL)]
    return unquote(keys[0]) if len(keys) == 1 else None


def subprotocols(request: web.Request) -> list[str]:
    """Return the subprotocols that a websocket's client offers."""
    return [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if name.strip()]


def owner_of(request: web.Request) -> bytes:
    """Return the owner whose sessions and responses a request may use: its API key's digest, or b"" without keys."""
    owner: bytes = request.get(OWNER, b"")
    return owner


def flow_of(request: web.Request) -> str:
    """Return the flow of a request, for fair scheduling: one per API key if there are several keys, otherwise empty."""
    flow: str = request.get(FLOW, "")
    return flow


def follows_link(request: web.Request) -> bool:
    """Return whether a user follows a link to the chat page. This is safe: no side effects, and framing is denied."""
    return request.path == PAGE and request.headers.get("Sec-Fetch-Dest") == "document"


def cors_headers(request: web.Request) -> dict[str, str]:
    """Return the CORS headers of the answer: none unless the request is an allowed cross-origin request."""
    origin = request.get(CORS_ORIGIN)
    if origin is None:
        return {}
    headers = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
    return CORS_HEADERS | {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Headers": headers,
        "Vary": "Origin",
    }


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def matches(hashed: bytes, keys: Iterable[bytes]) -> bool:
    """Return whether a key's digest equals one of `keys`, which are digests. Takes constant time."""
    return sum(hmac.compare_digest(hashed, key) for key in keys) > 0


def host_name(header: str) -> str:
    """Return the Host header without port and brackets."""
    match = re.fullmatch(r"\[([^\]]*)\](?::\d+)?|([^:]*)(?::\d+)?", header.strip().lower())
    return (match[1] or match[2] or "").rstrip(".") if match else ""


def is_local_name(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
