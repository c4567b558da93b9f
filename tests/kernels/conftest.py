import os
from collections.abc import Iterator

import pytest
import torch

from baton.kernels.runtime.cpp.targets import Target
from tests.kernels.installed import installed, runnable


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def native_kernels() -> Iterator[None]:
    """Install this checkout's C++, compiled for this CPU, with one thread."""
    with installed():
        yield


def targets() -> list[object]:
    """Return this CPU's targets. Only the best, and the best with shorter vectors, are without the mark `soak`.

    The sanitizers, which are in the soak, see all of them.
    """
    found = runnable()
    if "BATON_SANITIZE" in os.environ:
        return [*found]
    often = [*found[:1], *[target for target in found if target.march[0] != found[0].march[0]][:1]]
    return [pytest.param(each, marks=[] if each in often else [pytest.mark.soak]) for each in found]


@pytest.fixture(params=targets(), ids=lambda target: target.name, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Install this checkout's C++ with one thread, for each instruction set that this CPU supports."""
    with installed(request.param):
        yield request.param
