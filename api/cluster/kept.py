"""Restarting of a cluster's process whenever it ends."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from baton.api.cluster.processes import Launcher, LaunchError, ProcessSpec, RunningProcess

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a process that ended by itself is started again; doubles each time
STABLE_S = 60.0  # a process that ran longer than this resets the wait to FIRST_WAIT_S


class KeptProcess:
    """One process, which is started again whenever it ends, until `stop` is called."""

    def __init__(self, name: str, make_spec: Callable[[], ProcessSpec], launcher: Launcher) -> None:
        """make_spec: makes the description of the process, once for each start."""
        self.name = name
        self._make_spec, self._launcher = make_spec, launcher
        self._process: RunningProcess | None = None
        self._latest: RunningProcess | None = None  # the running process, or the last one that ran
        self._stopping = self._restarting = False
        self._ended = asyncio.Event()  # set, and then replaced by a new event, whenever the process ends
        self._stopped = asyncio.Event()
        self.starts = 0  # successful starts
        self.restarts = 0  # restarts after the process ended by itself or could not be started
        self.exit_code: int | None = None  # exit code of the last run that ended

    @property
    def url(self) -> str | None:
        """The URL at which the process listens; None while it does not run."""
        return self._process.url if self._process is not None else None

    @property
    def address(self) -> str | None:
        """The URL of the running process or of the last one that ran; None before the first start."""
        return self._latest.url if self._latest is not None else None

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def run(self) -> None:
        """Keep the process running until `stop`."""
        wait, log = FIRST_WAIT_S, structlog.get_logger().bind(process=self.name)
        while not self._stopping:
            seconds = await self._run_once(log)
            expected, self._restarting = self._stopping or self._restarting, False
            if expected:
                if seconds is not None:
                    log.info("ended", exit_code=self.exit_code)
                continue
            self.restarts += 1
            if seconds is not None:
                wait = FIRST_WAIT_S if seconds > STABLE_S else wait
                log.warning("ended by itself", exit_code=self.exit_code, again_after_s=wait)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stopped.wait()
            wait = min(2 * wait, LONGEST_WAIT_S)
        await self._launcher.release(self.name)

    async def _run_once(self, log: structlog.typing.FilteringBoundLogger) -> float | None:
        """Start the process and wait until it ends. Return how many seconds it ran; None if it did not start."""
        clock, seconds = asyncio.get_running_loop().time, None
        try:
            self._process = self._latest = await self._start()
            self.starts += 1
            log.info("started", url=self._process.url)
            started = clock()
            self.exit_code = await self._process.wait()
            seconds = clock() - started
        except LaunchError as error:
            if not self._stopping:
                log.error("cannot start", why=str(error))
        self._process = None
        self._ended.set()
        self._ended = asyncio.Event()
        return seconds

    async def _start(self) -> RunningProcess:
        """Start the process. Raises LaunchError if that fails, or if `stop` is called first."""
        starting = asyncio.ensure_future(self._launcher.start(self._make_spec()))
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if self._stopped.is_set():
            starting.cancel()
            if isinstance(process := (await asyncio.gather(starting, return_exceptions=True))[0], BaseException):
                raise LaunchError("it was stopped before it had started")
            await process.stop()
        return starting.result()

    async def stop(self) -> None:
        """Stop the process for good, and wait until it has drained and ended."""
        self._stopping = True
        self._stopped.set()
        if self._process is not None:
            ended = self._ended
            await self._process.stop()
            await ended.wait()

    async def restart(self) -> None:
        """Stop the process, and wait until it has drained and ended. `run` then starts it again."""
        if self._process is not None:
            self._restarting = True
            ended = self._ended
            await self._process.stop()
            await ended.wait()

    async def kill(self) -> None:
        """Kill the process. `run` then starts it again."""
        if self._process is not None:
            await self._process.kill()

    async def log(self, lines: int) -> str:
        """Return the last lines of the process's log."""
        return await self._latest.log(lines) if self._latest is not None else ""
