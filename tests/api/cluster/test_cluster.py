"""A real cluster of processes: a router and engines with the hash model, whose every token is known."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.hash_traffic import Traffic, make_checkpoint, wait_home
from tests.api.routing.test_router import TEMPLATE
from tests.api.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.anyio
FILE = """
model = "model"
[options]
drain_timeout = 3
[engines.engine]
replicas = 2
"""


class ClusterProcess(ServerProcess):
    """`baton cluster up` in a folder, until its router is ready. `get` and `post` go to the router."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(["baton.api.cli", "cluster", "up", str(folder / "cluster.toml")])

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait for the line with the router's URL, in place of a server's own line."""
        self.wait_until(lambda: self._line("started", "router") is not None)
        return self._line("started", "router") or {}

    def _line(self, event: str, process: str) -> dict[str, Any] | None:
        lines = (line for line in self.log if (line["event"], line.get("process")) == (event, process))
        return next(lines, None)

    def run(self, *arguments: str) -> str:
        """Run `baton cluster VERB FILE …` and return what it prints."""
        verb, *more = arguments
        command = [sys.executable, "-m", "baton.api.cli", "cluster", verb, str(self.folder / "cluster.toml"), *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def phases(self) -> list[str]:
        return [engine["phase"] for engine in self.get("/debug/engines")]

    def child(self, name: str) -> int:
        """Return the process id of an engine or of the router."""
        return child_of(self.process.pid, name)


def child_of(supervisor: int, name: str) -> int:
    """Return the process id of an engine or of the router of a supervisor, which is a process too."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    mark = b"route" if name == "router" else b"--engine-name\0" + name.encode()
    return next(child for child, command in commands.items() if mark in command)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    tmp_path = tmp_path_factory.mktemp("cluster")
    (tmp_path / "model").mkdir()
    make_checkpoint(tmp_path / "model", delay_ms=[2, 4])
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "cluster.toml").write_text(FILE)
    with ClusterProcess(tmp_path) as running:
        running.wait_until(lambda: running.phases() == ["ready", "ready"])
        yield running


async def traffic(cluster: ClusterProcess, over: asyncio.Event) -> Counter[str]:
    """Send requests, and check every token, until `over` is set. Return how they ended."""
    outcomes, seed = Counter[str](), 0
    while not over.is_set():
        sent = Traffic(cluster.url, seed, requests=60, at_once=16, finish=1, stream=2)
        await sent.run()
        outcomes += sent.outcomes
        seed += 1
    return outcomes


async def test_a_rolling_restart_fails_no_request(cluster: ClusterProcess) -> None:
    boots = {engine["name"]: engine["boot"] for engine in cluster.get("/debug/engines")}
    status, opened = cluster.post("/v1/sessions", {})
    assert status == 200
    assert cluster.post(f"/v1/sessions/{opened['id']}/turns", {"input_ids": [1, 2, 3], "max_tokens": 4})[0] == 200
    over = asyncio.Event()
    sending = asyncio.ensure_future(traffic(cluster, over))
    await asyncio.to_thread(cluster.run, "restart")
    over.set()
    assert (await sending).keys() == {"length"}
    for engine in cluster.get("/debug/engines"):
        assert engine["phase"] == "ready" and engine["boot"] != boots[engine["name"]]
    status, answer = cluster.post(f"/v1/sessions/{opened['id']}/turns", {"input_ids": [4], "max_tokens": 4})
    assert status == 200 and answer["turn"] == 2, "the session was handed over, twice"


def restarts(cluster: ClusterProcess) -> dict[str, int]:
    """Return how often each process has been restarted."""
    lines = [line.split() for line in cluster.run("status").splitlines()]
    return {line[0]: int(line[-1]) for line in lines[1:]}


async def test_the_cluster_survives_an_engine_and_the_router(cluster: ClusterProcess) -> None:
    over, before = asyncio.Event(), restarts(cluster)
    sending = asyncio.ensure_future(traffic(cluster, over))
    await asyncio.sleep(0.5)
    os.kill(cluster.child("engine-1"), signal.SIGKILL)
    await asyncio.sleep(0.5)
    over.set()
    assert (await sending).keys() == {"length"}
    os.kill(cluster.child("router"), signal.SIGKILL)
    cluster.wait_until(lambda: cluster.status("/ready") == 200 and cluster.phases() == ["ready", "ready"])
    await Traffic(cluster.url, 7, requests=30).run()
    after = restarts(cluster)
    assert list(after) == ["router", "engine-0", "engine-1"]
    assert [after[name] - before[name] for name in after] == [1, 0, 1]


def test_the_last_lines_of_a_log_are_printed(cluster: ClusterProcess) -> None:
    title, *lines = cluster.run("logs", "engine-0", "--lines", "3").splitlines()
    assert title == "==> engine-0 <=="
    written = (cluster.folder / "cluster.run/logs/engine-0.log").read_text().splitlines()
    assert [line for line in lines if line] == written[-3:]
    with pytest.raises(AssertionError, match="there is no process 'engine-9'; processes: engine-0, engine-1, router"):
        cluster.run("logs", "engine-9")


@pytest.mark.soak
async def test_ten_kills_of_the_router(cluster: ClusterProcess) -> None:
    """No session is lost, though each kill cuts off a turn and other requests, and the engines end clean."""
    sessions = [cluster.post("/v1/sessions", {})[1]["id"] for _ in range(6)]
    turn = {"input_ids": [1, 2, 3], "max_tokens": 4}
    for number in range(10):
        for session in sessions:
            status, answer = cluster.post(f"/v1/sessions/{session}/turns", turn)
            assert status == 200, (number, answer)
        sent = Traffic(cluster.url, number, requests=200, at_once=16, finish=1, stream=2)
        cut_off = asyncio.ensure_future(sent.run())
        await asyncio.sleep(0.3)
        os.kill(cluster.child("router"), signal.SIGKILL)
        await asyncio.gather(cut_off, return_exceptions=True)
        cluster.wait_until(lambda: cluster.status("/ready") == 200 and cluster.phases() == ["ready", "ready"])
    assert {each["id"] for each in cluster.get("/v1/sessions")["data"]} >= {*sessions}
    for engine in cluster.get("/debug/engines"):
        wait_home(cluster, engine["url"])


def test_a_cluster_runs_once(cluster: ClusterProcess) -> None:
    command = [sys.executable, "-m", "baton.api.cli", "cluster", "up", str(cluster.folder / "cluster.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "runs already" in done.stderr


def test_a_cluster_ends_as_a_whole(cluster: ClusterProcess) -> None:
    children = [cluster.child(name) for name in ("router", "engine-0", "engine-1")]
    cluster.run("down")
    assert cluster.wait() == 0
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_the_processes_end_with_their_supervisor(cluster: ClusterProcess) -> None:
    with ClusterProcess(cluster.folder) as again:
        check_that_children_end(again)


def check_that_children_end(cluster: ClusterProcess) -> None:
    children = [cluster.child(name) for name in ("router", "engine-0", "engine-1")]
    cluster.kill_now()
    cluster.wait()

    def ended(child: int) -> bool:
        stat = Path(f"/proc/{child}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    for _ in range(600):
        if all(ended(child) for child in children):
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError("a child goes on")
