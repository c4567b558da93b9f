"""Engines with TLS, whose certificates are trusted by the standard variable of OpenSSL."""

import asyncio
import ssl

import aiohttp
import pytest

from tests.api.connections.test_listening import PEM
from tests.api.routing.fake_engine import FakeEngine
from tests.api.routing.test_router import ROUTE
from tests.api.server_process import ServerProcess

pytestmark = pytest.mark.anyio
PATIENCE_S = 60


@pytest.mark.parametrize("trusted", [True, False])
async def test_streams_of_an_engine_with_tls_are_passed_on_if_its_certificate_is_trusted(trusted: bool) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(PEM)
    engine = FakeEngine("encrypted")
    await engine.server.start_server(ssl=context)
    assert engine.url.startswith("https://")
    variables = {"SSL_CERT_FILE": str(PEM)} if trusted else {}
    router = ServerProcess([*ROUTE, "--engine", engine.url], wait_ready=False, variables=variables)
    with router:
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession(router.url) as http:
            while not await is_decided(http):  # noqa: ASYNC110 (a router has no event for tests)
                await asyncio.sleep(0.05)
            async with http.post("/v1/completions", json={"prompt": [1], "stream": True}) as answer:
                text = await answer.text()
    await engine.server.close()
    assert answer.status == (200 if trusted else 503)
    assert bool(engine.asked) == trusted
    assert ('data: {"n": 2}' in text) == trusted


async def is_decided(http: aiohttp.ClientSession) -> bool:
    """Return whether the router has found the engine, or knows why not."""
    async with http.get("/debug/engines") as answer:
        engine = (await answer.json())[0]
    return engine["phase"] == "ready" or "CERTIFICATE_VERIFY_FAILED" in engine["why"]
