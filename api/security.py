"""Who may call: the Host and Origin checks against web pages elsewhere, and API keys."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import unquote

from aiohttp import web

from baton.api import errors
from baton.api.config import Config

PAGE = "/"
PROBES = frozenset({"/health", "/ready"})
KEYLESS = PROBES | {PAGE}
WEB = ("http", "https")
SUBPROTOCOL = "responses"
KEY_SUBPROTOCOL = "openai-insecure-api-key."
CORS_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Expose-Headers": "request-id, x-request-id, x-trace-id, retry-after",
    "Access-Control-Max-Age": "600",
}
CORS_ORIGIN: web.RequestKey[str] = web.RequestKey("cors_origin", str)
OWNER: web.RequestKey[bytes] = web.RequestKey("owner", bytes)
FLOW: web.RequestKey[str] = web.RequestKey("flow", str)


class Guard:
    """Decides from the headers alone. Raises ApiError for a request that is not let in."""

    def __init__(self, config: Config) -> None:
        self._keys = [digest(key) for key in config.accepted_keys()]
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.cors)
        self._hosts = frozenset(host.lower() for host in (*config.allowed_host, config.host))

    def admit(self, request: web.Request) -> None:
        """403 for a foreign Host or Origin, 401 without a key. A preflight is let in without one."""
        if request.path not in PROBES:
            self._check_host(request)
        self._check_origin(request)
        if request.path not in KEYLESS and request.method != "OPTIONS":
            self._check_key(request)

    def _check_host(self, request: web.Request) -> None:
        """A page can point a name of its own at this address (DNS rebinding), but never an address or localhost."""
        name = host_name(request.headers.get("Host", ""))
        if not ("*" in self._hosts or name in self._hosts or is_local_name(name) or is_address(name)):
            raise errors.forbidden(f"this server is not called {name!r}: --allowed-host {name} lets it be")

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if origin is None:
            # Requests that a page makes without CORS (an image, a link's prefetch) say only this.
            foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
            if foreign and "*" not in self._origins and not follows_link(request):
                raise errors.forbidden("cross-origin requests are refused: see --cors")
            return
        if "*" in self._origins or origin.lower() in self._origins:
            request[CORS_ORIGIN] = origin
        # Behind a proxy that ends TLS the page has another scheme than the request.
        elif origin.lower() not in {f"{scheme}://{request.headers.get('Host', '')}".lower() for scheme in WEB}:
            raise errors.forbidden(f"requests from pages at {origin} are refused: --cors {origin} lets them in")

    def _check_key(self, request: web.Request) -> None:
        if not self._keys:
            return
        key = given_key(request)
        if key is None or not matches(digest(key), self._keys):
            raise errors.unauthorized()
        request[OWNER] = digest(key)
        if len(self._keys) > 1:
            request[FLOW] = digest(key).hex()


def given_key(request: web.Request) -> str | None:
    """The API key that a request carries: `Authorization: Bearer`; without that header `x-api-key`, as Anthropic's
    clients send it, or a websocket's subprotocol.

    A web page cannot set the headers of its websocket; in a subprotocol the key is %-encoded. None if there is no key,
    or more than one.
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
    """What a websocket's client offers to speak."""
    return [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if name.strip()]


def owner_of(request: web.Request) -> bytes:
    """Whose sessions and responses this request may use: those of its API key, or of everyone where there are none."""
    owner: bytes = request.get(OWNER, b"")
    return owner


def flow_of(request: web.Request) -> str:
    """Whose requests take turns with those of others: an API key's, where there are several."""
    flow: str = request.get(FLOW, "")
    return flow


def follows_link(request: web.Request) -> bool:
    """Somebody opens the chat page by a link elsewhere. Nothing happens by that, and it cannot be framed."""
    return request.path == PAGE and request.headers.get("Sec-Fetch-Dest") == "document"


def cors_headers(request: web.Request) -> dict[str, str]:
    """What the answer to a cross-origin request that was let in must carry."""
    origin = request.get(CORS_ORIGIN)
    if origin is None:
        return {}
    asked = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
    return CORS_HEADERS | {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Headers": asked,
        "Vary": "Origin",
    }


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def matches(given: bytes, keys: Iterable[bytes]) -> bool:
    """Compare with every key, in constant time."""
    return sum(hmac.compare_digest(given, key) for key in keys) > 0


def host_name(header: str) -> str:
    """The Host header without its port and brackets."""
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
