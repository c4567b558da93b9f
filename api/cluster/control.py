"""HTTP over a Unix socket, with which `baton cluster status`, `logs`, `restart` and `down` reach the supervisor."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from baton.api.cluster.supervisor import Supervisor

LONGEST_PATH = 100  # bytes of a Unix socket's path; Linux allows 107
URL = "http://cluster"


class ControlError(Exception):
    """The error of a supervisor that cannot be reached, or that refuses a command."""


@asynccontextmanager
async def listening(supervisor: Supervisor, path: Path) -> AsyncIterator[None]:
    """Answer commands on the socket `path`. Raises ControlError if another supervisor listens there."""
    if len(bytes(path)) > LONGEST_PATH:
        raise ControlError(f"{path} is too long for a Unix socket: change to the folder of the file")
    if await reachable(path):
        raise ControlError("this cluster runs already")
    remove(path)
    runner = web.AppRunner(make_app(supervisor), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()  # only the owner can enter the folder
    try:
        yield
    finally:
        await runner.cleanup()
        remove(path)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def make_app(supervisor: Supervisor) -> web.Application:
    async def status(request: web.Request) -> web.Response:
        return web.json_response(supervisor.status())

    async def logs(request: web.Request) -> web.Response:
        lines, names = int(request.query["lines"]), request.query.getall("name", [])
        check_names(supervisor, names)
        chosen = [member for member in supervisor.members if not names or member.name in names]
        return web.json_response({member.name: await member.log(lines) for member in chosen})

    async def restart(request: web.Request) -> web.Response:
        names = await request.json()
        check_names(supervisor, names)
        await supervisor.restart(names)
        return web.json_response(None)

    async def down(request: web.Request) -> web.Response:
        supervisor.stop()
        return web.json_response(None)

    app = web.Application()
    app.add_routes([web.get("/status", status), web.get("/logs", logs)])
    app.add_routes([web.post("/restart", restart), web.post("/down", down)])
    return app


def check_names(supervisor: Supervisor, names: list[str]) -> None:
    """Raise HTTPNotFound if a process of this name does not exist."""
    known = {member.name for member in supervisor.members}
    if unknown := sorted(set(names) - known):
        raise web.HTTPNotFound(text=f"there is no process {unknown[0]!r}; processes: {', '.join(sorted(known))}")


async def reachable(path: Path) -> bool:
    """Return whether a supervisor listens on a socket."""
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True


async def ask(path: Path, method: str, command: str, body: object = None, **query: Any) -> Any:
    """Send a command to the supervisor, and return its answer. Raises ControlError."""
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as http,
            http.request(method, f"{URL}/{command}", json=body, params=query) as answer,
        ):
            text = await answer.text()
            if answer.status != 200:
                raise ControlError(text)
            return json.loads(text)
    except (aiohttp.ClientError, OSError) as error:
        raise ControlError(f"this cluster does not run: {error}") from None
