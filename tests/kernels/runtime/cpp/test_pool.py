"""Native code runs on torch's threads."""

import subprocess
import sys

from tests.kernels.installed import library_for

# A program in which torch computes first, then native code; both have enough rows for all threads.
SHARED = """
import os, sys
from pathlib import Path
import torch
from baton.kernels.norm.rms import add_rms_norm, native as rms_norm
from baton.kernels.runtime import cpp

def runtimes():
    paths = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
    return sorted(paths)

def threads():
    return sorted(int(entry.name) for entry in Path("/proc/self/task").iterdir())

torch.set_num_threads(3)
x, weight = torch.randn(3000, 257), torch.randn(257)
torch.softmax(x, -1)
before = runtimes(), threads()
assert len(before[0]) == 1, before
serial = cpp.install(Path(sys.argv[1]), threads=1) or add_rms_norm(x, x, weight, 1e-5)
cpp.use_threads(3)
shared = add_rms_norm(x, x, weight, 1e-5)
assert rms_norm.takes(x, x, weight)
assert (runtimes(), threads()) == before
assert torch.equal(serial[1], shared[1]) and torch.equal(serial[0], shared[0])
"""


def test_one_openmp_and_no_thread_more() -> None:
    subprocess.run([sys.executable, "-c", SHARED, str(library_for())], check=True, timeout=60)
