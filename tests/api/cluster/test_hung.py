"""Engines that hang: the supervisor kills them, and no engine that is only slow to start."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from baton.api.cluster import kept, supervisor
from baton.api.cluster.file import ClusterFile
from baton.api.cluster.local import LocalLauncher
from baton.api.cluster.router_client import RouterClient, SeenEngine, SeenLoad
from baton.api.cluster.supervisor import Supervisor
from tests.api.cluster.test_cluster import child_of
from tests.api.cluster.test_kept import FakeLauncher
from tests.api.hash_traffic import make_checkpoint

pytestmark = pytest.mark.anyio
HUNG_S = 0.1
PATIENCE_S = 60


class FakeRouter:
    """A router with one engine, in place of the client of a real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phase, self.name = "ready", "engine-0"
        for name in ("engines", "add", "remove"):
            monkeypatch.setattr(RouterClient, name, getattr(self, name))

    async def engines(self, router: str) -> dict[str, SeenEngine]:
        url = "http://engine"
        return {url: SeenEngine(url, self.name, self.phase, "both", "boot", 0, SeenLoad())}

    async def add(self, router: str, url: str) -> None:
        pass

    async def remove(self, router: str, url: str) -> None:
        pass


@asynccontextmanager
async def supervised(running: Supervisor) -> AsyncIterator[Supervisor]:
    task = asyncio.ensure_future(running.run())
    yield running
    running.stop()
    async with asyncio.timeout(PATIENCE_S):
        await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (processes have no event for tests)
            await asyncio.sleep(0.01)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A router and a launcher that take no time."""
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    monkeypatch.setattr(kept, "FIRST_WAIT_S", 0.01)
    return SimpleNamespace(router=FakeRouter(monkeypatch), launcher=FakeLauncher())


def one_engine(launcher: FakeLauncher) -> Supervisor:
    cluster = msgspec.convert({"engines": {"engine": {}}}, ClusterFile)
    return Supervisor(cluster, launcher, FakeLauncher(), {}, "", HUNG_S)


async def test_one_that_was_heard_of_is_killed_though_a_new_router_does_not_know_it(fast: SimpleNamespace) -> None:
    async with supervised(one_engine(fast.launcher)) as running:
        await asyncio.sleep(HUNG_S)
        fast.router.phase, fast.router.name = "lost", ""
        await fast.launcher.until(2)
        assert running.status()[1]["exit_code"] == -signal.SIGKILL


async def test_one_that_is_slow_to_start_again_is_left_alone(fast: SimpleNamespace) -> None:
    """It was heard of in its earlier life, but not in this one."""
    async with supervised(one_engine(fast.launcher)):
        await asyncio.sleep(HUNG_S)
        fast.router.phase = "lost"
        await fast.launcher.until(2)
        await asyncio.sleep(5 * HUNG_S)
        assert len(fast.launcher.started) == 2


@pytest.mark.soak
async def test_a_stopped_process_is_killed_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = make_checkpoint(tmp_path / "model")
    cluster = msgspec.convert(
        {"engines": {"engine": {"replicas": 2}}, "model": str(model), "linked": False}, ClusterFile
    )
    local = LocalLauncher(tmp_path, tmp_path / "logs")
    async with supervised(Supervisor(cluster, local, local, {}, "", hung_after=1.0)) as running:
        await until(lambda: [each["phase"] for each in running.status()[1:]] == ["ready", "ready"])
        os.kill(child_of(os.getpid(), "engine-1"), signal.SIGSTOP)
        await until(lambda: running.status()[2]["restarts"] == 1)
        await until(lambda: [each["phase"] for each in running.status()[1:]] == ["ready", "ready"])
        assert [each["restarts"] for each in running.status()] == [0, 0, 1]
        assert running.status()[2]["exit_code"] == -signal.SIGKILL
