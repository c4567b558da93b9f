"""Clients that leave: the engine that answers them is not at fault."""

from typing import Any, cast

import aiohttp
import pytest

from baton.api.routing.asking import read_asking
from baton.api.routing.bodies import ClientStream, Take
from baton.api.routing.counts import RouterCounts
from baton.api.routing.delivery import Delivery
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.forwarding import EngineStream, Forwarder

pytestmark = pytest.mark.anyio


class LeftClient:
    """The transport to a client that has left."""

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, 0


class OneChunk:
    """An engine's answer of one chunk."""

    def close(self) -> None:
        pass

    async def __aenter__(self) -> "OneChunk":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def pass_on(self, take: Take, caught_up: object) -> None:
        take(b"chunk")


async def test_an_engine_is_not_lost_because_its_client_has_left() -> None:
    async with aiohttp.ClientSession() as http:
        fleet = Fleet({})
        counts = RouterCounts(fleet)
        delivery = Delivery(fleet, Forwarder(fleet, http, counts), counts, timeout=1.0)
        answer = cast(Any, OneChunk())
        begun = EngineStream(EngineView(0, "http://engine"), answer, answer)
        client = ClientStream(cast(Any, LeftClient()), cast(Any, None), chunked=True)
        with pytest.raises(ConnectionResetError) as failure:
            await delivery._copy(begun, client, None, read_asking("/", b"", b""))
    assert not isinstance(failure.value, aiohttp.ClientError), "otherwise it would count as the engine's failure"
