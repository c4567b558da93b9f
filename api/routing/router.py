"""The parts of a router that its handlers share."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from baton.api.config import Config
from baton.api.routing.all_engines import AllEngines
from baton.api.routing.bodies import EngineConnector
from baton.api.routing.counts import RouterCounts
from baton.api.routing.delivery import Delivery
from baton.api.routing.engines import Fleet
from baton.api.routing.forwarding import Forwarder
from baton.api.routing.sockets import Sockets
from baton.api.security import accepted_keys


class Router:
    """The engines of a router, and the parts that forward requests to them. Create it inside the event loop."""

    def __init__(self, config: Config) -> None:
        keys = accepted_keys(config)
        own = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self.fleet = Fleet(own)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.header_timeout)
        self.http = aiohttp.ClientSession(
            timeout=timeout,
            connector=EngineConnector(),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        counts = RouterCounts(self.fleet)
        forwarder = Forwarder(self.fleet, self.http, counts)
        self.delivery = Delivery(self.fleet, forwarder, counts, config.request_timeout)
        self.sockets = Sockets(self.fleet, self.http, forwarder, config)
        self.all_engines = AllEngines(self.fleet, self.http, counts.registry)
        self.draining = False
        self.open = 0  # number of open requests
        self._closed = asyncio.Event()  # set whenever a request ends
        for url in config.engine:
            self.fleet.add(url)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as open."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
            self._closed.set()

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        while self.open:
            self._closed.clear()
            await self._closed.wait()

    async def close(self) -> None:
        await self.fleet.close()
        await self.http.close()


ROUTER = web.AppKey("router", Router)
