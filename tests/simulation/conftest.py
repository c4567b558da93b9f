"""A fixture that draws the first of the fresh seeds of a run; the seed is printed at the end."""

import os
import random

import pytest

FIRST_SEED = int(os.environ.get("BATON_FIRST_SEED") or random.SystemRandom().randrange(10**9))


@pytest.fixture(scope="session")
def first_seed() -> int:
    return FIRST_SEED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"simulation: fresh seeds from {FIRST_SEED} on; BATON_FIRST_SEED={FIRST_SEED} repeats them"
    )
