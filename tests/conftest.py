import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# Disable Hypothesis' deadline: how long an example takes depends on the load of the machine.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# One cache folder for the whole run, servers included, so that no test depends on the user's cache. Native code is
# compiled only once.
if not IS_WORKER:
    os.environ["BATON_CACHE"] = tempfile.mkdtemp(prefix="baton-tests-")


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_no_native_code() -> Iterator[None]:
    """Compute with one thread, and uninstall native code after each test file.

    Loading a model installs native code for the whole process, but the emulated devices of other test files have no
    memory for native code to read. Do not import torch here: most tests of the actors run without it and then start
    three times as fast.
    """
    use_one_thread()
    yield
    if "baton.kernels.runtime.cpp" in sys.modules:
        sys.modules["baton.kernels.runtime.cpp"].uninstall()
    use_one_thread()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a command that ran in this process has set up for its logs."""
    before, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    yield
    if structlog.get_config() != before:
        structlog.reset_defaults()
        logging.root.handlers[:] = [each for each in logging.root.handlers if each in handlers]
        logging.root.setLevel(level)


def use_one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["BATON_CACHE"], ignore_errors=True)
