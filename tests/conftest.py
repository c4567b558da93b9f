import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# One cache for a run, servers included: no test depends on the user's, and native code is compiled once.
if not IS_WORKER:
    os.environ["BATON_CACHE"] = tempfile.mkdtemp(prefix="baton-tests-")


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_no_native_code() -> Iterator[None]:
    """Compute with one thread, and uninstall native code after each file.

    Loading a model installs it for the process, but the pretended devices of another file have no memory for it.
    torch is not imported for this: most tests of the actors do without, and their start is three times as quick.
    """
    use_one_thread()
    yield
    if "baton.kernels.runtime.cpp" in sys.modules:
        sys.modules["baton.kernels.runtime.cpp"].uninstall()
    use_one_thread()


def use_one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["BATON_CACHE"], ignore_errors=True)
