"""The tests of direct_launches.py, in a process of their own.

They compile kernels. Triton's interpreter, which other tests of this folder use, changes `triton.language` for the rest
of its process, and the compiler then fails.
"""

import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).with_name("direct_launches.py")
ROOT = Path(__file__).resolve().parents[3]


def test_direct_launches_are_right_and_cheap() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(FILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
