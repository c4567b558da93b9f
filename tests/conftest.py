import os
import shutil
import tempfile

import pytest
import torch

torch.set_num_threads(1)

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# One cache for a run, servers included: no test depends on the user's, and native code is compiled once.
if not IS_WORKER:
    os.environ["BATON_CACHE"] = tempfile.mkdtemp(prefix="baton-tests-")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["BATON_CACHE"], ignore_errors=True)
