"""Listening with TLS, and on a Unix socket."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton.api.config import Config, ConfigError, load
from baton.api.connections.limits import connection_limits
from baton.api.connections.registry import Connections

pytestmark = pytest.mark.anyio
PEM = Path(__file__).with_name("localhost.pem")  # a certificate for localhost, signed by itself, and its key
TLS: dict[str, Any] = {"tls_cert": str(PEM), "tls_key": str(PEM)}


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[str]:
    """Run a server that answers "ok". Yields its URL."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer)
    runner, config = web.AppRunner(app), Config(port=0, **options)
    await runner.setup()
    connections = Connections(connection_limits(config))
    assert runner.server is not None
    try:
        yield await connections.listen(runner.server, config)
    finally:
        await connections.close(app)
        await runner.cleanup()


async def get(url: str, **options: Any) -> str:
    async with aiohttp.ClientSession(**options) as http, http.get(url) as answer:
        return await answer.text()


async def test_a_certificate_makes_connections_encrypted() -> None:
    trusted = ssl.create_default_context(cafile=str(PEM))
    async with listening(**TLS) as url:
        assert url.startswith("https://127.0.0.1:")
        assert await get(url, connector=aiohttp.TCPConnector(ssl=trusted)) == "ok"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await get(url)
        with pytest.raises(aiohttp.ClientError):
            await get(url.replace("https", "http"))


@pytest.mark.parametrize("options", [{}, TLS])
async def test_a_unix_socket_is_there_while_the_server_listens(tmp_path: Path, options: dict[str, str]) -> None:
    place = tmp_path / "baton.sock"
    for _ in range(2):
        async with listening(uds=str(place), **options) as url:
            assert url == f"unix:{place}" and place.is_socket()
            connector = aiohttp.UnixConnector(str(place))
            if not options:
                assert await get("http://localhost/", connector=connector) == "ok"
        assert not place.exists()


async def test_a_socket_that_a_killed_server_has_left_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "baton.sock"
    async with listening(uds=str(place)):
        left = tmp_path / "left.sock"
        place.rename(left)
    async with listening(uds=str(left)):
        assert await get("http://localhost/", connector=aiohttp.UnixConnector(str(left))) == "ok"


@pytest.mark.parametrize("options", [{"tls_cert": "no such file", "tls_key": str(PEM)}, TLS | {"tls_key": __file__}])
async def test_files_without_certificate_or_key_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--tls-cert, --tls-key: "):
        async with listening(**options):
            pass


async def test_what_cannot_be_the_name_of_a_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--host: 'a\.\.b' is not the name of a host"):
        async with listening(host="a..b"):
            pass


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key belong together"):
        load({"tls_cert": "x"}, {})


async def test_a_socket_in_use_is_not_taken_over(tmp_path: Path) -> None:
    place = tmp_path / "baton.sock"
    async with listening(uds=str(place)):
        with pytest.raises(OSError, match="in use"):
            async with listening(uds=str(place)):
                pass
        assert await get("http://localhost/", connector=aiohttp.UnixConnector(str(place))) == "ok"


async def test_a_socket_of_another_server_stays(tmp_path: Path) -> None:
    place, other = tmp_path / "baton.sock", tmp_path / "other.sock"
    async with listening(uds=str(other)):
        async with listening(uds=str(place)):
            other.rename(place)
        assert await get("http://localhost/", connector=aiohttp.UnixConnector(str(place))) == "ok"
