"""Compilation of native code: the sources, a library without a C++ runtime, and no fault that a sanitizer finds."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.kernels.runtime.cpp.build import KERNELS, build, key, name_of, sources
from baton.kernels.runtime.cpp.compiler import Compiler
from baton.kernels.runtime.cpp.targets import TARGETS, Target, machine
from tests.kernels.installed import compiler, emulated, library_for, runnable

ROOT = KERNELS.parent


def test_the_sources_are_those_of_all_operations_and_of_the_runtime() -> None:
    assert {str(path.relative_to(KERNELS)) for path in sources()} == {
        str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.cpp")
    }


def test_the_key_depends_on_everything_a_library_is_made_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gcc, other = Compiler(("c++",), "12.2"), Compiler(("c++",), "13.1")
    keys = {key(gcc, target) for target in TARGETS} | {
        key(other, TARGETS[0]),
        key(Compiler(("c++", "-g"), "12.2"), TARGETS[0]),
    }
    assert len(keys) == len(TARGETS) + 2
    assert key(gcc, TARGETS[0]).startswith(TARGETS[0].name)
    (tmp_path / "runtime" / "cpp").mkdir(parents=True)
    header = tmp_path / "runtime" / "cpp" / "numbers.h"
    monkeypatch.setattr("baton.kernels.runtime.cpp.build.KERNELS", tmp_path)
    header.write_text("a")
    before = key(gcc, TARGETS[0])
    header.write_text("b")
    assert key(gcc, TARGETS[0]) != before


def test_the_sources_of_an_operation_include_those_of_included_operations() -> None:
    """An operation that includes another's header needs the other's cpu.cpp, which defines what the header declares."""
    assert operations_of(sources({"norm.rms"})) == {"norm.rms", "runtime.cpp", "runtime.cpu_graph"}
    assert operations_of(sources({"moe.experts"})) == {
        "moe.experts",
        "linear.dense",
        "linear.int8_activations",
        "linear.quantized",
        "runtime.cpp",
        "runtime.cpu_graph",
    }
    assert operations_of(sources(set())) == {"runtime.cpp"}
    gcc, target = Compiler(("c++",), "12.2"), TARGETS[0]
    assert (
        len({key(gcc, target, of) for of in ({"norm.rms"}, {"moe.experts"}, {"moe.experts", "linear.dense"}, None)})
        == 3
    )


def test_only_sources_that_are_new_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("baton.kernels.runtime.cpp.build.KERNELS", tmp_path / "kernels")
    for name in ("norm/rms", "conv1d"):
        (tmp_path / "kernels" / name).mkdir(parents=True)
        (tmp_path / "kernels" / name / "cpu.cpp").write_text(name)
    header = tmp_path / "kernels" / "norm" / "sums.h"
    header.write_text("a")
    objects, ran = tmp_path / "objects", list[str]()

    def run(compiler: Compiler, arguments: list[str]) -> None:
        Path(arguments[-1]).write_text(" ".join(arguments))
        if "-c" in arguments:
            ran.append(name_of(Path(arguments[-3])))

    def compiled(operations: set[str] | None = None, target: Target = TARGETS[-1], version: str = "12.2") -> set[str]:
        ran.clear()
        build(Compiler(("c++",), version), target, tmp_path / "library.so", operations, objects=objects)
        return set(ran)

    monkeypatch.setattr(Compiler, "run", run)

    assert compiled({"conv1d"}) == {"conv1d"}
    assert compiled() == {"norm.rms"} and compiled() == set()
    assert (tmp_path / "library.so").read_text().count(".o") == 2
    plain = next(target for target in TARGETS if target.name == "x86-64-v4")
    assert TARGETS[1].name == plain.name + "-bf16", "the name of one target begins with the name of another"
    assert compiled(target=plain) == compiled(target=TARGETS[1]) == {"norm.rms", "conv1d"}
    (tmp_path / "kernels" / "conv1d" / "cpu.cpp").write_text("changed")
    assert compiled() == {"conv1d"}
    next(objects.glob(f"{TARGETS[-1].name}-*.o")).write_text("damaged")
    assert len(compiled()) == 1
    header.write_text("b")
    assert compiled() == {"norm.rms", "conv1d"} and compiled(version="13") == {"norm.rms", "conv1d"}
    assert len(list(objects.iterdir())) == 6, "objects of older sources and compilers are removed"


def operations_of(sources: list[Path]) -> set[str]:
    return {name_of(source) for source in sources}


@pytest.mark.parametrize("name", ["x86-64-v4-amx", "x86-64-v4-bf16", "x86-64-v4"])
def test_sources_are_right_for_targets_that_this_cpu_lacks(name: str, tmp_path: Path) -> None:
    """Compiled libraries of the others are tested. Whether a function is used is known only after a compilation.

    Without optimisation that takes half as long. Where AMX is emulated, one source has all of its instructions.
    """
    target = next(target for target in TARGETS if target.name == name)
    if target in runnable() or target.machine != machine():
        pytest.skip("the libraries of this target are tested, or it is of another architecture")
    flags = [*compiler().flags(target), "-O0", "-c", "-Wextra", "-Werror", f"-I{KERNELS}"]

    def compile_one(source: Path) -> None:
        compiler().run([*flags, str(source), "-o", str(tmp_path / f"{name_of(source)}-{source.stem}.o")])

    with ThreadPoolExecutor(2) as workers:
        list(workers.map(compile_one, sources(["linear.dense"] if "amx" in name and emulated() else None)))


def test_a_library_needs_no_cpp_runtime() -> None:
    """Zig links no C++ runtime, so kernels cannot use containers, exceptions or `new`."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library_for())], capture_output=True, text=True, check=True
    )
    needed = [line.split()[1].partition("@")[0] for line in listed.stdout.splitlines() if line.split()[0] == "U"]
    assert "aligned_alloc" in needed
    libraries = [ctypes.CDLL(name) for name in ("libc.so.6", "libm.so.6")]
    assert [name for name in needed if not any(hasattr(library, name) for library in libraries)] == []


@pytest.mark.soak
def test_sanitizers_find_nothing() -> None:
    """The tests of all operations pass with AddressSanitizer and UBSan in the library."""
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
         "--ignore", "tests/kernels/runtime/cpp", "--ignore", "tests/kernels/gpu"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.soak
@pytest.mark.skipif(not emulated(), reason="this CPU has AMX, or lacks more of the target than AMX")
def test_models_agree_with_their_references_on_amx() -> None:
    """The tests of kernels and models pass with AMX, emulated."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not soak", "tests/kernels",
         "--ignore", "tests/kernels/gpu", "tests/models/test_parity.py", "tests/models/test_drafts.py",
         "tests/models/test_recorded.py", "tests/actors/test_drafts.py"],
        cwd=ROOT, env=os.environ | {"BATON_EMULATE_AMX": "yes"}, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
