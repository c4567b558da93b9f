"""Clients that leave: the engine that answers them is not at fault."""

from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from baton.api.routing.asking import read_asking
from baton.api.routing.counts import RouterCounts
from baton.api.routing.delivery import Delivery
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.forwarding import EngineStream, Forwarder

pytestmark = pytest.mark.anyio


class LeftClient:
    async def write(self, chunk: bytes) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")


class Answer:
    """An engine's answer of one chunk."""

    @property
    def content(self) -> "Answer":
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield b"chunk"

    def close(self) -> None:
        pass

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_an_engine_is_not_lost_because_its_client_has_left() -> None:
    async with aiohttp.ClientSession() as http:
        fleet = Fleet({})
        counts = RouterCounts(fleet)
        delivery = Delivery(fleet, Forwarder(fleet, http, counts), counts, timeout=1.0)
        begun = EngineStream(EngineView(0, "http://engine"), cast(Any, Answer()))
        with pytest.raises(ConnectionResetError) as failure:
            await delivery._copy(begun, cast(web.StreamResponse, LeftClient()), None, read_asking("/", b"", b""))
    assert not isinstance(failure.value, aiohttp.ClientError), "otherwise it would count as the engine's failure"
