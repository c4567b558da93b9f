from collections.abc import Iterator

import pytest
import torch

from baton.kernels.runtime import cpp


@pytest.fixture(autouse=True)
def one_thread_and_no_native_code() -> Iterator[None]:
    """Uninstall native code and return to one thread after each test: loading a model changes both for this process."""
    yield
    cpp.uninstall()
    torch.set_num_threads(1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
