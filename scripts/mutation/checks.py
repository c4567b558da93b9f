"""What is run against a fault: seeds of the simulator and the ring's tests, in a process that may break."""

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
from scripts.mutation.processes import Tell

# What the tests import and no fault is in: loaded once, in the process that all others are forked from.
PRELOADED = ("anyio", "hypothesis.stateful", "msgspec", "pytest", "safetensors.torch", "structlog", "torch")
# They draw other seeds each time; or look for known bugs, and miss them by chance where messages run another way.
DESELECTED = ("tests/simulation/test_seeds.py::test_fresh_seeds", "tests/simulation/test_mutations.py")
LEAST_SECONDS, TIMES_AS_LONG = 20.0, 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """A seed or a test; the seconds that it takes without a fault, and the functions of the tree that it enters."""

    name: int | str
    seconds: float
    entered: frozenset[tuple[str, str]]

    def reaches(self, file: Path, function: str) -> bool:
        """Whether it enters the function; what stands outside of functions is taken to concern every check."""
        return not function or (str(file), function) in self.entered


def enter(tree: Path) -> None:
    """Make this process one that works on a copy of the tree, and says nothing."""
    os.chdir(tree)
    sys.path[:0] = [str(tree)]
    import_from(tree)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)


class TestFailed(Exception):
    """How it failed."""

    __test__ = False


def run_seeds(seeds: Iterable[Check], tell: Tell) -> None:
    """Raises what the first that fails raises."""
    from tests.simulation.driver import Simulation

    for check in seeds:
        tell(f"seed {check.name}")
        limit_time(check.seconds)
        Simulation(check.name).run()
    signal.alarm(0)


def run_tests(tests: list[Check], tell: Tell) -> None:
    """Raises TestFailed at the first that fails, and fails again: once may have been the machine's."""
    while tests:
        tell("tests")
        first = run_watched(tests, tell)
        if first is None:
            return
        at = next((i for i, test in enumerate(tests) if test.name == first.failed), 0)
        again = run_watched(tests[at : at + 1], tell)
        if again is not None:
            raise TestFailed(again.how)
        tests = tests[at + 1 :]


def run_watched(tests: list[Check], tell: Tell) -> "TestWatcher | None":
    """None if all pass."""
    watcher = TestWatcher({str(check.name): check.seconds for check in tests}, tell)
    return None if run_pytest(list(watcher.seconds), watcher) == 0 else watcher


def run_pytest(names: list[str], plugin: object) -> int:
    import pytest

    arguments = ["-x", "-m", "not soak", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--capture=no"]
    # What is loaded before pytest begins is not rewritten by it, and need not be.
    return int(pytest.main([*arguments, "-W", "ignore::pytest.PytestAssertRewriteWarning", *names], [plugin]))


def reason(report: Any) -> str:
    """Why a test failed, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0] if crash else f"at {report.when}"


def limit_time(seconds: float) -> None:
    """End this process if what takes so long by itself takes very much longer: it may never end."""
    signal.alarm(int(max(LEAST_SECONDS, TIMES_AS_LONG * seconds)))


class TestWatcher:
    """A plugin of pytest that limits each test's time, and keeps the first failure."""

    __test__ = False

    def __init__(self, seconds: dict[str, float], tell: Tell) -> None:
        self.seconds, self._tell = seconds, tell
        self.failed, self.how = "", "they cannot be collected"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(nodeid)
        limit_time(self.seconds[nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed, self.how = report.nodeid, reason(report)

    def pytest_runtest_logfinish(self) -> None:
        signal.alarm(0)


class Tracer:
    """Notes the functions of a tree that are entered, but for its tests, on all threads that begin after `start`."""

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
    """A plugin of pytest that measures each test. What is entered for a fixture that several share counts for all."""

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
        """With the functions that the test has entered before, since it is not known here when the fixture is done."""
        if fixturedef.scope != "function":
            file = request.node.nodeid.partition("::")[0]
            self._shared.setdefault(file, self._tracer.entered)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} {reason(report)}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._alone[nodeid] = time.perf_counter() - self._began, self._tracer.entered

    def checks(self) -> Iterator[Check]:
        for name, (seconds, entered) in self._alone.items():
            shared = self._shared.get(name.partition("::")[0], set())
            yield Check(name, seconds, frozenset(entered | shared | (self._imported or set())))


def measure_seeds(seeds: Iterable[int], tracer: Tracer, tell: Tell) -> Iterator[Check]:
    from tests.simulation.driver import Simulation

    imported = tracer.entered
    for seed in seeds:
        tell(f"seed {seed}")
        tracer.entered, began = set(), time.perf_counter()
        Simulation(seed).run()
        yield Check(seed, time.perf_counter() - began, frozenset(tracer.entered | imported))


def measure_tests(paths: Iterable[str], tracer: Tracer, tell: Tell) -> list[Check]:
    tell("tests")
    plugin = TestTracer(tracer)
    code = run_pytest([*paths, *(f"--deselect={name}" for name in DESELECTED)], plugin)
    if code != 0:
        raise TestFailed(f"{plugin.failed[0] if plugin.failed else 'the tests cannot be collected'}")
    return list(plugin.checks())
