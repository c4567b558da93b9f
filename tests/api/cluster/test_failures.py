"""Launches and looks that fail: the supervisor goes on."""

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.api.cluster.local import LocalLauncher
from baton.api.cluster.processes import LaunchError, ProcessSpec
from baton.api.cluster.router_client import RouterClient, RouterLostError

pytestmark = pytest.mark.anyio


async def test_a_log_that_cannot_be_written_is_a_failed_launch(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path, tmp_path / "logs")
    (tmp_path / "logs" / "engine-0.log").mkdir()
    with pytest.raises(LaunchError, match="engine-0"):
        await launcher.start(ProcessSpec("engine-0", "serve", {}))


@pytest.mark.parametrize("text", ['{"detail": "not found"}', '[{"url": 1}]', "hello", ""])
async def test_another_program_at_the_routers_port_is_no_router(text: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="application/json")

    app, client = web.Application(), RouterClient("")
    app.router.add_get("/debug/engines", answer)
    async with TestServer(app) as server:
        with pytest.raises(RouterLostError):
            await client.engines(str(server.make_url("")).rstrip("/"))
    await client.close()
