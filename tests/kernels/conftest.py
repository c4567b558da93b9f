import os
from collections.abc import Iterator

import pytest
import torch

from baton.kernels.runtime.cpp.targets import Target
from tests.kernels.installed import emulated, installed, runnable


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def native_kernels() -> Iterator[None]:
    """Install this checkout's C++, compiled for this CPU, with one thread."""
    with installed():
        yield


def targets() -> list[object]:
    """Return this CPU's targets, and AMX emulated if it lacks that. Most have the mark `soak`.

    Without it are the best, the best with shorter vectors, and AMX. The sanitizers, which are in the soak, see all.
    """
    found = runnable()
    tiles = [target for target in emulated() if target not in found]
    if "BATON_SANITIZE" in os.environ:
        return [*found, *tiles]
    often = [*found[:1], *[target for target in found if target.march[0] != found[0].march[0]][:1], *tiles]
    return [pytest.param(each, marks=[] if each in often else [pytest.mark.soak]) for each in [*found, *tiles]]


@pytest.fixture(params=targets(), ids=lambda target: target.name, scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Install this checkout's C++ with one thread, for each instruction set that this CPU supports."""
    with installed(request.param):
        yield request.param
