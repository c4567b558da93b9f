from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def denormals_as_before() -> Iterator[None]:
    """Disable denormal flushing again after a test: a step enables it for its thread, here the thread of all tests."""
    yield
    torch.set_flush_denormal(False)
