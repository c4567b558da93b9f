"""The life cycle of the router's process: it opens the port, follows the engines, and drains after a signal."""

import asyncio

import anyio
import structlog
from aiohttp import web

from baton.api.config import Config, ConfigError
from baton.api.connections.limits import descriptor_limit, raise_descriptor_limit
from baton.api.connections.listening import place_of
from baton.api.connections.registry import CONNECTIONS
from baton.api.machine.signals import Signals
from baton.api.routing.app import make_router
from baton.api.routing.router import ROUTER
from baton.api.telemetry import logs

LAST_WRITES_S = 5.0
NEVER_S = 1e9


def route(config: Config, signals: Signals) -> int:
    """Run the router until a signal, then let open requests finish. Return the exit code."""
    logs.configure(config.log_format, config.log_level)
    return anyio.run(run, config, signals, backend_options={"use_uvloop": True})


async def run(config: Config, signals: Signals) -> int:
    log, stop, loop = structlog.get_logger(), asyncio.Event(), asyncio.get_running_loop()
    signals.deliver_on(loop, stop.set)
    raise_descriptor_limit()
    try:
        app = make_router(config)
    except ConfigError as error:
        log.critical("cannot start", error=str(error))
        return 2
    check_descriptors(app[CONNECTIONS].limits.connections, config)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WRITES_S, keepalive_timeout=NEVER_S
    )
    await runner.setup()
    try:
        assert runner.server is not None
        url = await app[CONNECTIONS].listen(runner.server, config)
    except (OSError, ConfigError) as error:
        log.critical("cannot listen", place=place_of(config), error=getattr(error, "strerror", None) or str(error))
        await runner.cleanup()
        return 2
    log.info("listening", url=url, engines=len(config.engine))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app[CONNECTIONS].watch)
        await stop.wait()
        await drain(app, config.drain_timeout)
        await runner.cleanup()
        tasks.cancel_scope.cancel()
    return 0


def check_descriptors(connections: int, config: Config) -> None:
    """Warn if the limit on open files allows fewer clients than --max-connections."""
    if connections < config.max_connections:
        message = "the limit on open files is low: raise it (ulimit -n), or lower --max-connections"
        structlog.get_logger().warning(message, limit=descriptor_limit(), connections=connections)


async def drain(app: web.Application, seconds: float) -> None:
    """Refuse new requests, and wait at most `seconds` until open ones have finished."""
    router = app[ROUTER]
    router.draining = True
    structlog.get_logger().info("draining", open_requests=router.open)
    with anyio.move_on_after(seconds):
        await router.wait_idle()
