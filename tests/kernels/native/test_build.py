"""What is compiled: everything, without a runtime of its own, and without a fault that a sanitizer finds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native.build import KERNELS, key, sources
from kernels.native.compiler import Compiler
from kernels.native.targets import TARGETS
from tests.kernels.installed import compiler, runnable

ROOT = KERNELS.parent


def test_the_sources_are_every_operations_and_the_rooms_own() -> None:
    assert {str(path.relative_to(KERNELS)) for path in sources()} == {
        str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.cpp")
    }


def test_whatever_a_library_is_made_from_is_in_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gcc, other = Compiler(("c++",), "12.2"), Compiler(("c++",), "13.1")
    keys = {key(gcc, target) for target in TARGETS} | {
        key(other, TARGETS[0]),
        key(Compiler(("c++", "-g"), "12.2"), TARGETS[0]),
    }
    assert len(keys) == len(TARGETS) + 2
    assert key(gcc, TARGETS[0]).startswith(TARGETS[0].name)
    (tmp_path / "native").mkdir()
    header = tmp_path / "native" / "numbers.h"
    monkeypatch.setattr("kernels.native.build.KERNELS", tmp_path)
    header.write_text("a")
    before = key(gcc, TARGETS[0])
    header.write_text("b")
    assert key(gcc, TARGETS[0]) != before


def test_a_library_needs_no_cpp_runtime(tmp_path: Path) -> None:
    """Zig links none, and has none to link to: no containers, no exceptions, no `new`."""
    alone = ("-nostdlib", "-Wl,-z,defs", "-lc", "-lm", "-lgcc")
    found = compiler()
    objects = [str(tmp_path / f"{number}.o") for number in range(len(sources()))]
    for source, compiled in zip(sources(), objects, strict=True):
        found.run([*found.flags(runnable()[0]), "-c", str(source), "-o", compiled])
    found.run(["-shared", *objects, *alone, "-o", str(tmp_path / "alone.so")])


@pytest.mark.soak
def test_sanitizers_find_nothing() -> None:
    """The operations' tests again, with AddressSanitizer and UBSan in the library."""
    gcc = compiler()
    runtimes = [
        subprocess.run([*gcc.command, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "BATON_SANITIZE": "yes",
        "LD_PRELOAD": " ".join(path.strip() for path in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qsx", "-p", "no:cacheprovider", "-m", "not soak", "tests/kernels",
         "--ignore", "tests/kernels/native"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
