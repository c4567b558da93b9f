from collections.abc import Iterator

import pytest
import torch

from kernels import native
from tests.kernels.installed import library_for


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def native_kernels() -> Iterator[None]:
    """The C++ of this checkout, for what this CPU has, in one thread."""
    assert native.install(library_for(), threads=1) == {}
    yield
    native.uninstall()
