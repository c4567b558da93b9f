"""Processes that end by themselves, and that are stopped and restarted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from baton.api.cluster import kept as module
from baton.api.cluster.kept import KeptProcess
from baton.api.cluster.processes import LaunchError, ProcessSpec, RunningProcess

pytestmark = pytest.mark.anyio


class FakeProcess:
    """A process that ends when the test wants it."""

    url = "http://engine"

    def __init__(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await self.ended

    async def stop(self) -> None:
        self.ended.set_result(0)

    async def kill(self) -> None:
        self.ended.set_result(-9)

    async def log(self, lines: int) -> str:
        return "the log"


class FakeLauncher:
    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.slow = False  # whether a start takes for ever
        self.failures = 0  # the next starts that fail
        self.released: list[str] = []
        self.news = asyncio.Event()

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        self.news.set()
        if self.slow:
            await asyncio.Event().wait()
        if self.failures:
            self.failures -= 1
            raise LaunchError("no room")
        self.started.append(FakeProcess())
        return self.started[-1]

    async def release(self, name: str) -> None:
        self.released.append(name)

    async def close(self) -> None:
        pass

    async def until(self, count: int) -> None:
        """Wait until so many processes have been started."""
        async with asyncio.timeout(10):
            while len(self.started) < count:
                self.news.clear()
                await self.news.wait()
        await asyncio.sleep(0.01)  # until it has the process


@asynccontextmanager
async def kept_running(launcher: FakeLauncher) -> AsyncIterator[KeptProcess]:
    """Keep a process running. At the end it is stopped, which takes no long time."""
    process = KeptProcess("engine", lambda: ProcessSpec("engine", "serve", {}), launcher)
    running = asyncio.ensure_future(process.run())
    await launcher.until(0 if launcher.slow else 1)
    yield process
    async with asyncio.timeout(5):
        await process.stop()
        await running
    assert launcher.released == ["engine"]


@pytest.fixture(autouse=True)
def first_wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a process that has ended again after this time, in seconds."""
    monkeypatch.setattr(module, "FIRST_WAIT_S", getattr(request, "param", 0.01))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list to which each wait is added, instead of waiting."""
    found, timeout = list[float](), asyncio.timeout

    def at_once(seconds: float) -> asyncio.Timeout:
        found.append(seconds)
        return timeout(0)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": at_once}))
    return found


slowly_again = pytest.mark.parametrize("first_wait", [60.0], indirect=True)


async def test_a_process_that_ends_is_started_again() -> None:
    launcher = FakeLauncher()
    async with kept_running(launcher) as process:
        await process.kill()
        await launcher.until(2)
        assert (process.restarts, process.exit_code, process.url) == (1, -9, "http://engine")
    assert len(launcher.started) == 2 and process.url is None and process.exit_code == 0


async def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    launcher = FakeLauncher()
    launcher.failures = 3
    async with kept_running(launcher) as process:
        assert process.restarts == 3


@pytest.mark.parametrize("first_wait", [0.5], indirect=True)
async def test_the_first_wait_is_the_shortest(waits: list[float]) -> None:
    launcher = FakeLauncher()
    async with kept_running(launcher) as process:
        for starts in range(2, 10):
            await process.kill()
            await launcher.until(starts)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("first_wait", [0.5], indirect=True)
async def test_only_a_long_run_resets_the_wait(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails is no run, however long it takes."""
    monkeypatch.setattr(module, "STABLE_S", 0.0)
    launcher = FakeLauncher()
    launcher.failures = 3
    async with kept_running(launcher) as process:
        await process.kill()
        await launcher.until(2)
    assert waits == [0.5, 1.0, 2.0, 0.5]


async def test_a_failed_start_is_logged_as_that_alone() -> None:
    launcher = FakeLauncher()
    with capture_logs() as logs:
        async with kept_running(launcher) as process:
            launcher.failures = 2
            await process.kill()
            await launcher.until(2)
    events = [(line["event"], line.get("why"), line.get("exit_code")) for line in logs if line["event"] != "started"]
    failed = ("cannot start", "no room", None)
    assert events == [("ended by itself", None, -9), failed, failed, ("ended", None, 0)]
    assert process.restarts == 3


async def test_a_stop_before_a_process_runs_is_no_failure() -> None:
    launcher = FakeLauncher()
    launcher.slow = True
    with capture_logs() as logs:
        async with kept_running(launcher):
            await launcher.news.wait()
    assert logs == []


async def test_a_restart_is_no_failure() -> None:
    launcher = FakeLauncher()
    async with kept_running(launcher) as process:
        await process.restart()
        await launcher.until(2)
        assert process.restarts == 0


@slowly_again
async def test_one_that_waits_for_its_next_start_can_be_stopped() -> None:
    launcher = FakeLauncher()
    async with kept_running(launcher) as process:
        await process.kill()
        await asyncio.sleep(0.01)
    assert len(launcher.started) == 1


async def test_one_that_is_being_started_can_be_stopped() -> None:
    launcher = FakeLauncher()
    launcher.slow = True
    async with kept_running(launcher) as process:
        await launcher.news.wait()
    assert process.address is None


@slowly_again
async def test_the_address_and_the_log_outlive_a_process() -> None:
    async with kept_running(FakeLauncher()) as process:
        await process.kill()
        await asyncio.sleep(0.01)
        assert (process.url, process.address, await process.log(5)) == (None, "http://engine", "the log")
