"""A process of a cluster that is kept running."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from baton.api.cluster.processes import Launcher, LaunchError, ProcessSpec, RunningProcess

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a process that has failed is started again, twice as long each time
STABLE_S = 60.0  # a process that has run for so long was no failed start


class KeptProcess:
    """One process, which is started again whenever it ends, until it is to stop."""

    def __init__(self, name: str, make_spec: Callable[[], ProcessSpec], launcher: Launcher) -> None:
        """make_spec: makes what is started, each time."""
        self.name = name
        self._make_spec, self._launcher = make_spec, launcher
        self._process: RunningProcess | None = None
        self._latest: RunningProcess | None = None  # it, or the one that has ended
        self._stopping = self._restarting = False
        self._ended = asyncio.Event()  # is set, and replaced, whenever the process ends
        self._stopped = asyncio.Event()
        self.starts = 0  # all of them
        self.restarts = 0  # of its own accord
        self.exit_code: int | None = None  # the latest one

    @property
    def url(self) -> str | None:
        """Where it listens; None while it does not run."""
        return self._process.url if self._process is not None else None

    @property
    def address(self) -> str | None:
        """Where it listens, or listened until it ended; None before its first start."""
        return self._latest.url if self._latest is not None else None

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def run(self) -> None:
        """Keep the process running until `stop`."""
        wait, clock = FIRST_WAIT_S, asyncio.get_running_loop().time
        log = structlog.get_logger().bind(process=self.name)
        while not self._stopping:
            started = clock()
            try:
                self._process = self._latest = await self._start()
                self.starts += 1
                log.info("started", url=self._process.url)
                self.exit_code = await self._process.wait()
            except LaunchError as error:
                log.error("cannot start", why=str(error))
            self._process = None
            self._ended.set()
            self._ended = asyncio.Event()
            if self._stopping or self._restarting:
                log.info("ended", exit_code=self.exit_code)
                self._restarting = False
                continue
            self.restarts += 1
            wait = FIRST_WAIT_S if clock() - started > STABLE_S else min(2 * wait, LONGEST_WAIT_S)
            log.warning("ended by itself", exit_code=self.exit_code, again_after_s=wait)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stopped.wait()
        await self._launcher.release(self.name)

    async def _start(self) -> RunningProcess:
        """Start the process. Raises LaunchError if it cannot be started, or is to stop before it is."""
        starting = asyncio.ensure_future(self._launcher.start(self._make_spec()))
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if self._stopped.is_set():
            starting.cancel()
            if isinstance(process := (await asyncio.gather(starting, return_exceptions=True))[0], BaseException):
                raise LaunchError("it is to stop")
            await process.stop()
        return starting.result()

    async def stop(self) -> None:
        """Let it drain and end, for good. Return when it has ended."""
        self._stopping = True
        self._stopped.set()
        if self._process is not None:
            ended = self._ended
            await self._process.stop()
            await ended.wait()

    async def restart(self) -> None:
        """Let it drain and end, and start it again. Return when it has ended."""
        if self._process is not None:
            self._restarting = True
            ended = self._ended
            await self._process.stop()
            await ended.wait()

    async def kill(self) -> None:
        """End it at once. It is started again."""
        if self._process is not None:
            await self._process.kill()

    async def log(self, lines: int) -> str:
        """Return the last lines of its log."""
        return await self._latest.log(lines) if self._latest is not None else ""
