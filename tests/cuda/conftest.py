import sys

import pytest
import torch


def pytest_runtest_setup() -> None:
    """Skip tests that cannot run here; the interpreter and tests/late test the same on every machine."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    if "tests.kernels.gpu.interpreter" in sys.modules:
        pytest.skip("in this process Triton's kernels are interpreted: run tests/cuda by itself")
