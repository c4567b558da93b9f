"""A trial runs the checks on one fault in a copy of the tree; a baseline measures the checks without a fault."""

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.mutation.checks import Check, Tracer, enter, measure_seeds, measure_tests, run_seeds, run_tests
from scripts.mutation.processes import Notify
from scripts.mutation.sites import Mutant

QUICK_SEEDS, QUICK_TEST = 100, 1.0  # run first: this many seeds, and tests that take fewer seconds


@dataclass(frozen=True, slots=True)
class Baseline:
    """Checks to measure without a fault."""

    seeds: tuple[int, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault, and the checks that may find it."""

    mutant: Mutant
    checks: tuple[Check, ...]

    def seeds(self) -> list[Check]:
        """Return the seeds, the quickest first."""
        return sorted((c for c in self.checks if isinstance(c.name, int)), key=lambda check: check.seconds)

    def tests(self) -> list[Check]:
        """Return the tests, the quickest first."""
        return sorted((c for c in self.checks if isinstance(c.name, str)), key=lambda check: check.seconds)


def measure(tree: Path, work: Baseline, notify: Notify) -> list[Check]:
    """Run all checks without a fault, and measure them."""
    enter(tree)
    tracer = Tracer(tree)
    tracer.start()
    found = list(measure_seeds(work.seeds, tracer, notify)) if work.seeds else []
    return found + (measure_tests(work.tests, tracer, notify) if work.tests else [])


def try_it(tree: Path, trial: Trial, notify: Notify) -> None:
    """Put the fault into the tree and run the checks. Raises the error of the first check that fails.

    The original file is kept under another name until remove_fault restores it.
    """
    notify("import")
    enter(tree)
    sys.dont_write_bytecode = True
    file = tree / trial.mutant.file
    file.rename(original(file))
    file.write_bytes(trial.mutant.source)
    seeds, tests = trial.seeds(), trial.tests()
    quick = [test for test in tests if test.seconds < QUICK_TEST]
    run_seeds(seeds[:QUICK_SEEDS], notify)
    run_tests(quick, notify)
    run_seeds(seeds[QUICK_SEEDS:], notify)
    run_tests(tests[len(quick) :], notify)


def remove_fault(tree: Path, trial: Trial) -> None:
    """Restore the original file. Call this after the trial's process has ended."""
    file = tree / trial.mutant.file
    original(file).replace(file)


def original(file: Path) -> Path:
    """Return the path at which the original is kept while the file has a fault."""
    return file.with_suffix(".clean")
