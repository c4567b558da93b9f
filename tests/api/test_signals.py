"""Signals at every moment of a server's life: it ends in order, with the documented exit code, and nothing is left."""

import asyncio
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path

import pytest

from baton.api.machine.signals import Signals
from tests.api.server_process import SERVE, ServerProcess
from tests.api.test_process import FAKE, post_in_background

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MOMENTS = (4, 40)  # signals at random moments of a start: always, and with --soak
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo slow compiler && exit
sleep 3600 &
echo $$ $! > {ids}.new && mv {ids}.new {ids}
wait
"""

alone = partial(ServerProcess, is_forked=False)
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc shows which signals a process handles")


def handles(server: ServerProcess, number: int) -> bool:
    """Return whether the process handles a signal by now. Before that, Python itself starts."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    [caught] = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def check_end(server: ServerProcess, code: int = 0) -> None:
    """Check that the process ends with this code, and that it ends as intended."""
    output = server.wait(), "".join(server.output)
    server.kill()
    assert output[0] == code, output[1]
    assert "Traceback" not in output[1] and "terminate called" not in output[1], output[1]


def is_there(pid: int) -> bool:
    """Return whether a process runs. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module", autouse=True)
def default_sighup() -> Iterator[None]:
    """Let servers be started without nohup, which they respect, also if the tests run under it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def start_s(default_sighup: None) -> float:
    """Measure how long a start takes, from the first signal handler until the server is ready."""
    with alone([*SERVE, "--memory", "64M"]):
        pass  # the first start may compile
    server = alone([*SERVE, "--memory", "64M"])
    server.wait_until(lambda: handles(server, signal.SIGTERM))
    began = time.monotonic()
    server.wait_for("ready")
    found = time.monotonic() - began
    server.process.send_signal(signal.SIGTERM)
    check_end(server)
    return found


@linux
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.soak if seed >= MOMENTS[0] else ()) for seed in range(MOMENTS[1])]
)
def test_a_signal_at_any_moment_of_a_start(start_s: float, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    number = SIGNALS[seed % len(SIGNALS)]
    server = alone([*SERVE, "--memory", "64M", "--session-dir", str(tmp_path)])
    server.wait_until(lambda: handles(server, signal.SIGHUP))
    time.sleep(chance.uniform(0, start_s))  # the moment itself is under test
    server.process.send_signal(number)
    check_end(server)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", ["slow", "restoring"])
def test_a_signal_ends_a_start_that_would_never_end(tmp_path: Path, phase: str, number: int) -> None:
    server = ServerProcess([FAKE, phase, f"session_dir={tmp_path}"])
    server.wait_for("sized" if phase == "restoring" else "listening")
    server.process.send_signal(number)
    check_end(server)
    assert server.log[-1]["event"] == "ended before it was ready"


@linux
def test_no_compiler_outlives_a_start(tmp_path: Path) -> None:
    """Neither the compiler, which is a script here, nor what it has started is left."""
    ids, script = tmp_path / "ids", tmp_path / "slow-c++"
    script.write_text(COMPILER.format(ids=ids))
    script.chmod(0o755)
    variables = {"CXX": str(script), "BATON_CACHE": str(tmp_path / "cache")}
    server = alone([*SERVE, "--memory", "64M"], variables=variables)
    server.wait_until(ids.exists)
    processes = [int(pid) for pid in ids.read_text().split()]
    assert all(map(is_there, processes))
    server.process.send_signal(signal.SIGTERM)
    check_end(server)
    deadline = time.monotonic() + 10  # they are killed, and the system ends them
    while any(map(is_there, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_there, processes))


def test_sighup_drains() -> None:
    with ServerProcess([FAKE, "pausing"]) as server:
        thread, answers = post_in_background(server, "/generate", {"text": "a"})
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("draining")
        thread.join()
        assert answers[0][0] == 200
        check_end(server)


def test_nohup_keeps_a_server_that_lost_its_terminal() -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = ServerProcess([FAKE, "plain"])
    finally:
        signal.signal(signal.SIGHUP, ignored)
    with server:
        server.process.send_signal(signal.SIGHUP)
        assert server.post("/generate", {"text": "a"})[0] == 200
    assert [line["name"] for line in server.log if line["event"] == "signal"] == ["SIGTERM"]


def attempt(server: ServerProcess) -> None:
    """Send a request that may get no answer."""
    with suppress(OSError, HTTPException):
        server.post("/generate", {"text": "a"})


def test_a_third_signal_ends_a_process_whose_loop_is_stuck() -> None:
    """Signals are sent until the process ends: one that comes at once after another may wait for that one's handler."""
    with ServerProcess([FAKE, "stuck"], exit_code=4) as server:
        request = threading.Thread(target=lambda: attempt(server))
        request.start()
        server.wait_until(lambda: "stuck\n" in server.output)
        deadline, sent = time.monotonic() + 60, 0
        while server.process.poll() is None and time.monotonic() < deadline:
            server.process.send_signal(signal.SIGTERM)
            sent += 1
            time.sleep(0.05)
        check_end(server, 4)
        assert sent >= 3
        request.join()


def test_a_signal_after_the_end_of_the_event_loop_does_nothing() -> None:
    """A router's or a cluster's process still runs for a moment then."""
    loop, signals, received = asyncio.new_event_loop(), Signals(), list[int]()
    signals.deliver_on(loop, lambda: received.append(1))
    signals._receive(signal.SIGINT)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    signals._receive(signal.SIGINT)
    assert received == [1]
