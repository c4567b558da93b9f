from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def denormals_as_before() -> Iterator[None]:
    """Restore denormals: a step flushes them in its thread, which here also runs the tests after it."""
    yield
    torch.set_flush_denormal(False)
