"""The checks that may find a fault: seeds of the simulator and the actors' tests.

A check runs in a process that the fault may break (see processes.py).
"""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from scripts.launch import import_from
from scripts.mutation.processes import Notify

# Modules that tests import and that contain no faults: imported once, in the process from which all jobs are forked.
PRELOADED = ("anyio", "hypothesis.stateful", "msgspec", "pytest", "safetensors.torch", "structlog", "torch")
# Tests that say nothing about a fault: they draw new seeds each time, or they search for planted bugs by seed, which
# they may miss if a fault reorders messages.
DESELECTED = ("tests/simulation/test_seeds.py::test_fresh_seeds", "tests/simulation/test_mutations.py")
# Time limit of a check: TIMES_AS_LONG times its time without a fault, but at least LEAST_SECONDS.
LEAST_SECONDS, TIMES_AS_LONG = 20.0, 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """A seed of the simulator, or a test."""

    name: int | str  # a seed, or the id of a test
    seconds: float  # time without a fault
    entered: frozenset[tuple[str, str]]  # (file, function) of each function that the check enters, except in tests

    def reaches(self, file: Path, function: str) -> bool:
        """Return whether the check enters a function. Code outside of functions (empty name) concerns every check."""
        return not function or (str(file), function) in self.entered


def enter(tree: Path) -> None:
    """Let this process import from a copy of the checkout, and discard the output of the process."""
    os.chdir(tree)
    sys.path[:0] = [str(tree)]
    import_from(tree)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)


def preload() -> None:
    """Import slow modules before processes are forked, so that the processes need not import them."""
    for name in PRELOADED:
        importlib.import_module(name)


class TestFailed(Exception):
    """An error: a test has failed; the message says how."""

    __test__ = False


def run_seeds(seeds: Iterable[Check], notify: Notify) -> None:
    """Run seeds of the simulator. Raises the error of the first seed that fails."""
    from tests.simulation.driver import Simulation

    for check in seeds:
        assert isinstance(check.name, int)
        notify(f"seed {check.name}")
        limit_time(check.seconds)
        Simulation(check.name).run()
    signal.alarm(0)


def run_tests(tests: list[Check], notify: Notify) -> None:
    """Run tests. Raises TestFailed if a test fails twice in a row: a single failure may be due to a busy machine."""
    while tests:
        notify("tests")
        first = run_watched(tests, notify)
        if first is None:
            return
        at = next((i for i, test in enumerate(tests) if test.name == first.failed), 0)
        again = run_watched(tests[at : at + 1], notify)
        if again is not None:
            raise TestFailed(again.how)
        tests = tests[at + 1 :]


def run_watched(tests: list[Check], notify: Notify) -> "TestWatcher | None":
    """Run tests up to the first failure. Return the plugin that has noted the failure, or None if all tests pass."""
    watcher = TestWatcher({str(check.name): check.seconds for check in tests}, notify)
    return None if run_pytest(list(watcher.seconds), watcher) == 0 else watcher


def run_pytest(names: list[str], plugin: object) -> int:
    import pytest

    arguments = ["-x", "-m", "not soak", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--capture=no"]
    # pytest warns that it cannot rewrite assertions of modules that are already imported; that does no harm here.
    return int(pytest.main([*arguments, "-W", "ignore::pytest.PytestAssertRewriteWarning", *names], [plugin]))


def reason(report: Any) -> str:
    """Return why a test failed, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0] if crash else f"at {report.when}"


def limit_time(seconds: float) -> None:
    """Kill this process (SIGALRM) if a check that normally takes `seconds` takes far longer: it may never end."""
    signal.alarm(int(max(LEAST_SECONDS, TIMES_AS_LONG * seconds)))


class TestWatcher:
    """A pytest plugin that limits each test's time and notes the first failure."""

    __test__ = False

    def __init__(self, seconds: dict[str, float], notify: Notify) -> None:
        self.seconds, self._notify = seconds, notify
        self.failed, self.how = "", "they cannot be collected"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._notify(nodeid)
        limit_time(self.seconds[nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed, self.how = report.nodeid, reason(report)

    def pytest_runtest_logfinish(self) -> None:
        signal.alarm(0)


class Tracer:
    """A record of the functions of a checkout that are entered after `start`, except its tests.

    Threads that were started before `start` are not traced, except the caller's thread.
    """

    def __init__(self, tree: Path) -> None:
        self._prefix = f"{tree}/"
        self._names: dict[CodeType, tuple[str, str] | None] = {}
        self.entered: set[tuple[str, str]] = set()

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code not in self._names:
            self._names[code] = self._name(code)
        name = self._names[code]
        if name is not None:
            self.entered.add(name)

    def _name(self, code: CodeType) -> tuple[str, str] | None:
        if not code.co_filename.startswith(self._prefix):
            return None
        file = code.co_filename.removeprefix(self._prefix)
        return None if file.startswith("tests/") else (file, code.co_qualname.split(".<locals>")[0])


class TestTracer:
    """A pytest plugin that notes each test's time and the functions that the test enters.

    Functions that a shared fixture enters count for all tests of the file.
    """

    __test__ = False

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._began = 0.0
        self._imported: set[tuple[str, str]] | None = None
        self._alone: dict[str, tuple[float, set[tuple[str, str]]]] = {}
        self._shared: dict[str, set[tuple[str, str]]] = {}
        self.failed: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._imported is None:
            self._imported = self._tracer.entered
        self._tracer.entered, self._began = set(), time.perf_counter()

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> None:
        """Count all functions of the first test as the shared fixture's: no hook shows when the fixture is done."""
        if fixturedef.scope != "function":
            file = request.node.nodeid.partition("::")[0]
            self._shared.setdefault(file, self._tracer.entered)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} {reason(report)}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._alone[nodeid] = time.perf_counter() - self._began, self._tracer.entered

    def checks(self) -> Iterator[Check]:
        """Yield each measured test as a check."""
        for name, (seconds, entered) in self._alone.items():
            shared = self._shared.get(name.partition("::")[0], set())
            yield Check(name, seconds, frozenset(entered | shared | (self._imported or set())))


def measure_seeds(seeds: Iterable[int], tracer: Tracer, notify: Notify) -> Iterator[Check]:
    """Run seeds of the simulator without a fault, and yield each as a check."""
    from tests.simulation.driver import Simulation

    imported = tracer.entered
    for seed in seeds:
        notify(f"seed {seed}")
        tracer.entered, began = set(), time.perf_counter()
        Simulation(seed).run()
        yield Check(seed, time.perf_counter() - began, frozenset(tracer.entered | imported))


def measure_tests(paths: Iterable[str], tracer: Tracer, notify: Notify) -> list[Check]:
    """Run tests without a fault, and return each as a check. Raises TestFailed if a test fails."""
    notify("tests")
    plugin = TestTracer(tracer)
    code = run_pytest([*paths, *(f"--deselect={name}" for name in DESELECTED)], plugin)
    if code != 0:
        raise TestFailed(f"{plugin.failed[0] if plugin.failed else 'the tests cannot be collected'}")
    return list(plugin.checks())
