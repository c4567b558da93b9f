"""One fault in one copy of the tree, and the checks without any fault that it is compared with."""

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.mutation.checks import Check, Tracer, enter, measure_seeds, measure_tests, run_seeds, run_tests
from scripts.mutation.processes import Tell
from scripts.mutation.sites import Mutant

QUICK_SEEDS, QUICK_TEST = 100, 1.0


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
        return sorted((c for c in self.checks if isinstance(c.name, int)), key=lambda check: check.seconds)

    def tests(self) -> list[Check]:
        return sorted((c for c in self.checks if isinstance(c.name, str)), key=lambda check: check.seconds)


def measure(tree: Path, work: Baseline, tell: Tell) -> list[Check]:
    enter(tree)
    tracer = Tracer(tree)
    tracer.start()
    found = list(measure_seeds(work.seeds, tracer, tell)) if work.seeds else []
    return found + (measure_tests(work.tests, tracer, tell) if work.tests else [])


def try_it(tree: Path, trial: Trial, tell: Tell) -> None:
    """Raises what the first check that fails raises. The clean file stays beside the one with the fault."""
    tell("import")
    enter(tree)
    sys.dont_write_bytecode = True
    file = tree / trial.mutant.file
    file.rename(clean(file))
    file.write_bytes(trial.mutant.source)
    seeds, tests = trial.seeds(), trial.tests()
    quick = [test for test in tests if test.seconds < QUICK_TEST]
    run_seeds(seeds[:QUICK_SEEDS], tell)
    run_tests(quick, tell)
    run_seeds(seeds[QUICK_SEEDS:], tell)
    run_tests(tests[len(quick) :], tell)


def take_out(tree: Path, trial: Trial) -> None:
    """The fault, once its process is gone."""
    file = tree / trial.mutant.file
    clean(file).replace(file)


def clean(file: Path) -> Path:
    return file.with_suffix(".clean")
