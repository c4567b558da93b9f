from collections.abc import Iterator

import pytest
import torch

from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.targets import Target
from tests.kernels.installed import installed, library_for, runnable


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def native_kernels() -> Iterator[None]:
    """The C++ of this checkout, for what this CPU has, in one thread."""
    assert cpp.install(library_for(), threads=1) == {}
    yield
    cpp.uninstall()


@pytest.fixture(params=runnable(), ids=lambda target: target.name, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The C++ of this checkout, for each set of instructions that this CPU has, in one thread."""
    with installed(request.param):
        yield request.param
