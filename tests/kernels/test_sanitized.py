"""The tests of native code once more, with its reads, writes and arithmetic watched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WATCHED = ["test_mixer_prefill.py", "test_attention_native.py"]


@pytest.mark.soak
@pytest.mark.parametrize("name", WATCHED)
def test_under_address_and_undefined_behaviour_sanitizers(name: str) -> None:
    runtime = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not soak", str(Path(__file__).with_name(name))],
        env={**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "BATON_SANITIZE": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
