"""The supervisor's requests to the router."""

from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

TIMEOUT_S = 5.0
PATH = "/debug/engines"


class SeenLoad(Struct):
    """The load of an engine, as the router reports it."""

    rows: int = 0
    queue_seconds: float = 0.0


class SeenEngine(Struct):
    """An engine, as the router reports it."""

    url: str
    name: str
    phase: str
    role: str
    boot: str  # a new value for each start of the engine
    requests: int  # requests that the router has sent to the engine since it last found it
    load: SeenLoad


class RouterLostError(Exception):
    """The error of a router that does not answer, or that refuses."""


class RouterClient:
    """A client of the router's /debug/engines: it lists, adds and removes engines."""

    def __init__(self, key: str) -> None:
        """key: the operator's API key; empty without keys."""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: aiohttp.ClientSession | None = None

    async def engines(self, router: str) -> dict[str, SeenEngine]:
        """Return the router's engines by URL. Raises RouterLostError."""
        try:
            found = msgspec.convert(await self._ask("GET", router), list[SeenEngine])
        except msgspec.ValidationError as error:
            raise RouterLostError(f"this is no router: {error}") from None
        return {engine.url: engine for engine in found}

    async def add(self, router: str, url: str) -> None:
        await self._ask("POST", router, {"url": url})

    async def remove(self, router: str, url: str) -> None:
        await self._ask("DELETE", router, {"url": url})

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _ask(self, method: str, router: str, body: dict[str, str] | None = None) -> Any:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            self._http = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        try:
            async with self._http.request(method, f"{router}{PATH}", json=body) as answer:
                answer.raise_for_status()
                return await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise RouterLostError(f"{type(error).__name__}: {error}") from None
