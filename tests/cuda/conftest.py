import sys

import pytest
import torch


def pytest_runtest_setup() -> None:
    """Skip these tests where they cannot run. The same behaviour is tested everywhere in the interpreter and in
    tests/late.
    """
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    if "tests.kernels.gpu.interpreter" in sys.modules:
        pytest.skip("in this process Triton's kernels are interpreted: run tests/cuda by itself")
