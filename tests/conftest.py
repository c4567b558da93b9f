import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from baton.kernels.runtime import cpp

torch.set_num_threads(1)
# A machine that does other things besides takes as long as it takes.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# One cache for a run, servers included: no test depends on the user's, and native code is compiled once.
if not IS_WORKER:
    os.environ["BATON_CACHE"] = tempfile.mkdtemp(prefix="baton-tests-")


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    """Loading a model in this process installs native code: another file's pretended devices have no memory for it."""
    yield
    cpp.uninstall()
    torch.set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["BATON_CACHE"], ignore_errors=True)
