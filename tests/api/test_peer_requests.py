"""Requests that a server computes for its peers."""

import asyncio
from typing import Any

import pytest

from baton.actors.messages import Abort, Submit
from baton.actors.peers.frames import Compute
from baton.actors.tokens import pack
from baton.api.generation.gateway import Gateway
from baton.api.peering.requests import PeerRequests

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_peer_that_gives_up_at_once_leaves_no_request(turns: int) -> None:
    """A task that is cancelled before its first step runs none of its code."""
    gateway, sent = Gateway(timeout=600), list[Any]()
    gateway.bind(lambda to, message: sent.append(message))
    requests = PeerRequests(gateway, vocab_size=100, max_model_len=100)
    requests.computed = lambda loan, error: pytest.fail(f"{loan} {error}")
    assert requests.begin(1, Compute(1, "", pack([1, 2, 3]), 0, 0, 0, ""), "link") == ""
    for _ in range(turns):
        await asyncio.sleep(0)
    requests.stop(1)
    requests.stop(1)
    await asyncio.sleep(0.01)
    assert [type(message) for message in sent] == [Submit, Abort] and gateway.open_requests == 0
