"""The threads that share loops: each part is done once; workers start with the first loop, and end if they are many."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.kernels.runtime.cpp.build import KERNELS
from tests.kernels.installed import compiler, library_for

STRESS = Path(__file__).with_name("pool_stress.cpp")
# A program whose native code runs in one, three, two and three threads.
CHANGED = """
import signal, sys, time
from pathlib import Path
import torch
from baton.kernels.norm.rms import add_rms_norm, native as rms_norm
from baton.kernels.runtime import cpp

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

def blocked(task):
    [mask] = [line.split()[1] for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk")]
    return {number for number in signal.valid_signals() if int(mask, 16) >> number - 1 & 1}

torch.set_num_threads(1)
x, weight = torch.randn(3000, 257), torch.randn(257)
before, others = threads(), set(Path("/proc/self/task").iterdir())
cpp.install(Path(sys.argv[1]), threads=1)
assert rms_norm.takes(x, x, weight)
alone = add_rms_norm(x, x, weight, 1e-5)
assert threads() == before
for number in (3, 2, 3):
    cpp.use_threads(number)
    torch.set_num_threads(1)
    until = time.monotonic() + 10
    while threads() > before + number - 1 and time.monotonic() < until:
        add_rms_norm(x, x, weight, 1e-5)  # workers end by themselves, also if one loop follows another
    shared = add_rms_norm(x, x, weight, 1e-5)
    assert threads() == before + number - 1
    workers = set(Path("/proc/self/task").iterdir()) - others  # their numbers may be lower than those of the others
    while any(signal.SIGSEGV in blocked(task) for task in workers):  # until it runs, a thread blocks all signals
        assert time.monotonic() < until
    assert all(signal.SIGINT in blocked(task) for task in workers)
    assert torch.equal(alone[0], shared[0]) and torch.equal(alone[1], shared[1])
"""
# A program that forks while another thread runs loops. The child computes with workers of its own.
FORKED = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from baton.kernels.norm.rms import add_rms_norm
from baton.kernels.runtime import cpp

cpp.install(Path(sys.argv[1]), threads=3)
torch.set_num_threads(1)
x, weight = torch.randn(600, 257), torch.randn(257)
expected, _ = add_rms_norm(x, x, weight, 1e-5)

over = threading.Event()

def compute():
    while not over.is_set():
        add_rms_norm(x, x, weight, 1e-5)
        time.sleep(0.00005)  # until about when workers go to sleep

computing = threading.Thread(target=compute)
computing.start()
for turn in range(100):
    child = os.fork()
    if not child:
        signal.alarm(20)
        same = all(torch.equal(add_rms_norm(x, x, weight, 1e-5)[0], expected) for _ in range(20))
        os._exit(not same or len(list(Path("/proc/self/task").iterdir())) != 3)
    status = os.waitpid(child, 0)[1]
    if status:
        break
over.set()
computing.join()
assert status == 0, turn
"""
# A program that switches flushing of denormals on and off in its calling thread, after the workers were started.
FLUSHED = """
import sys
from pathlib import Path
import torch
from baton.kernels.activations import sigmoid_gate
from baton.kernels.runtime import cpp

cpp.install(Path(sys.argv[1]), threads=2)
torch.set_num_threads(1)
x, gate = torch.full((4000, 256), 1e-38), torch.zeros(4000, 256)
for flush in (False, True, False):
    torch.set_flush_denormal(flush)
    for turn in range(20):
        assert not sigmoid_gate(x, gate).view(torch.int32).any(), (flush, turn)
    assert (x[0] * 0.5).view(torch.int32).any() != flush, "the caller's setting stays"
"""


def test_denormals_become_zero_in_every_thread_whatever_the_caller_does() -> None:
    """A worker has the setting of the thread that started it, so a result would depend on which thread computes it."""
    subprocess.run([sys.executable, "-c", FLUSHED, str(library_for())], check=True, timeout=60)


def test_a_forked_process_computes_with_workers_of_its_own() -> None:
    """A worker may hold the lock at the fork, and the child would wait for it forever."""
    subprocess.run([sys.executable, "-c", FORKED, str(library_for())], check=True, timeout=120)


def test_workers_come_and_go_and_change_no_bit() -> None:
    subprocess.run([sys.executable, "-c", CHANGED, str(library_for())], check=True, timeout=60)


@pytest.mark.parametrize("flags", [[], ["-fsanitize=thread"]], ids=["", "sanitized"])
def test_each_part_is_done_once(flags: list[str], tmp_path: Path) -> None:
    """Two threads run loops on pools of one to five threads. Some parts sleep, and some callers pause between loops."""
    run_stress(tmp_path, flags, [])


def test_a_loop_does_not_wait_for_threads_that_never_come(tmp_path: Path) -> None:
    run_stress(tmp_path, [], ["without workers"])


def run_stress(folder: Path, flags: list[str], arguments: list[str]) -> None:
    files = [str(STRESS), str(KERNELS / "runtime" / "cpp" / "pool.cpp")]
    command = [*compiler().command, "-std=c++17", "-O2", "-pthread", *flags, "-I", str(KERNELS), "-o"]
    built = subprocess.run([*command, str(folder / "stress"), *files], capture_output=True, text=True)
    if flags and "tsan" in built.stderr:
        pytest.skip("the compiler has no sanitizer of threads")
    assert not built.returncode, built.stderr
    done = subprocess.run([folder / "stress", *arguments], capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stdout + done.stderr
