from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def denormals_as_before() -> Iterator[None]:
    """A step flushes them in its thread; here that is the one of all tests behind."""
    yield
    torch.set_flush_denormal(False)
