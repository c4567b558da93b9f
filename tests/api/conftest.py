from collections.abc import Iterator

import pytest
import torch

from baton.kernels.runtime import cpp


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    """Loading a model in this process installs native code and sets the threads."""
    yield
    cpp.uninstall()
    torch.set_num_threads(1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
