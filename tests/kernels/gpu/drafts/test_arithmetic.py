"""Compiled kernels for drafts compute a token as the kernels for one token do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.soak
def test_state_updates_compile_to_the_same_arithmetic() -> None:
    """The process is another one, because the interpreter, which this one uses, prevents compilation."""
    command = [sys.executable, "-m", "tests.kernels.gpu.drafts.arithmetic"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 6
    for kernels in found.values():
        assert len(kernels) == 2
        one, other = kernels.values()
        assert one == other and one[1]
