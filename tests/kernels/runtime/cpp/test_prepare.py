"""Preparation and installation of the native library, and each failure after which torch runs instead."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.kernels.norm.rms import add_rms_norm
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import library
from baton.kernels.runtime.cpp.cache import cache_folder
from baton.kernels.runtime.cpp.compiler import find_compiler
from baton.kernels.runtime.cpp.prepare import Prepared, prepare
from baton.kernels.runtime.cpp.targets import AMX, TARGETS
from tests.kernels.installed import compiler, library_for, runnable

NAME = "baton_add_rms_norm"
OPERATIONS = {"norm.rms"}  # one operation is enough here, and compiles quickly


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    cpp.uninstall()
    yield
    cpp.uninstall()


def prepared(on_compile: Callable[[Prepared], None] = lambda found: None) -> Prepared:
    found = prepare(OPERATIONS, on_compile)
    found.install(threads=1)
    return found


def make_compiler(path: Path, body: str) -> str:
    """Create a compiler and return its path: a shell script that prints a version for --version, else runs `body`."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "made up 1.0" && exit 0\n{body}\n')
    path.chmod(0o755)
    return str(path)


def assert_torch_runs() -> None:
    assert cpp.function(NAME) is None
    residual, normed = add_rms_norm(torch.ones(1, 4), None, torch.full((4,), 2.0), 0.0)
    assert torch.equal(normed, 2 * residual)


def test_the_second_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    compilations = list[Prepared]()
    first = prepared(compilations.append)
    assert (first.problem, first.cache_problem, first.left_out, first.compiled) == ("", "", {}, True)
    assert first.target == runnable()[0]
    assert cpp.function(NAME) is not None
    second = prepared(compilations.append)
    assert (second.problem, second.compiled, len(compilations)) == ("", False, 1)
    (built,) = (tmp_path / "cache").glob("*.so")
    damaged = built.read_bytes()[:1000]
    built.unlink()  # This process has mapped the file, and would crash if it were overwritten in place.
    built.write_bytes(damaged)
    third = prepared(compilations.append)
    assert (third.problem, third.compiled) == ("", True)


def test_an_assembler_without_amx_gets_the_next_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    real, best = shutil.which(compiler().command[0]), next(each for each in runnable() if not each.needs >= AMX)
    refusal = f'case "$*" in *-mamx-tile*) echo "error: no such instruction" >&2; exit 1;; esac\nexec {real} "$@"'
    monkeypatch.setenv("CXX", make_compiler(tmp_path / "old", refusal))
    monkeypatch.setattr("baton.kernels.runtime.cpp.prepare.targets_here", lambda: [TARGETS[0], best])
    found = prepared()
    assert (found.problem, found.target) == ("", best)
    assert cpp.function(NAME) is not None


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "no C++ compiler" in prepared().problem
    assert_torch_runs()


def test_a_compiler_from_pypi_is_the_last_resort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__main__.py").write_text("print('clang version 20.1')")
    (tmp_path / "ziglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not compiler().is_zig
    monkeypatch.setenv("PATH", "")
    found = compiler()
    assert (found.command, found.version, found.is_zig) == (
        (sys.executable, "-m", "ziglang", "c++"), "clang version 20.1", True,
    )  # fmt: skip
    assert f"-mcpu={runnable()[0].zig}" in found.flags(runnable()[0])


@pytest.mark.parametrize(("variable", "value"), [("CXX", "c++ 'unclosed"), ("BATON_CACHE", "~nobody\0")])
def test_variables_that_make_no_sense(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(os.environ) | {variable: value}
    monkeypatch.setattr("baton.kernels.runtime.cpp.prepare.find_compiler", lambda: find_compiler(environment))
    monkeypatch.setattr("baton.kernels.runtime.cpp.prepare.cache_folder", lambda: cache_folder(environment))
    assert prepared().problem
    assert_torch_runs()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    script = 'echo "In file included from here:" >&2; echo "pool.cpp:1: error: unknown -march" >&2; exit 1'
    monkeypatch.setenv("CXX", make_compiler(tmp_path / "c", script))
    assert prepared().problem.endswith("/c ended with 1: pool.cpp:1: error: unknown -march")
    assert_torch_runs()
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch computes if the library cannot be loaded, as on a file system that is mounted noexec."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(
        "CXX", make_compiler(tmp_path / "c", 'for last; do :; done; echo "not what it should be" > "$last"')
    )
    found = prepared()
    assert found.compiled
    assert "invalid ELF header" in found.problem or "file too short" in found.problem
    assert_torch_runs()


def test_a_cache_that_is_refused_is_replaced_by_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    open_to_all, temporary = tmp_path / "cache", tmp_path / "temporary"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    temporary.mkdir()
    monkeypatch.setenv("BATON_CACHE", str(open_to_all))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    found = prepared()
    assert (found.problem, found.compiled) == ("", True)
    assert "mode 777" in found.cache_problem
    assert cpp.function(NAME) is not None
    assert list(open_to_all.iterdir()) == list(temporary.iterdir()) == []
    add_rms_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-5)


def test_only_one_of_two_simultaneous_processes_compiles(tmp_path: Path) -> None:
    log = tmp_path / "log"
    wrapped = make_compiler(tmp_path / "c", f'echo "$@" >> {log}; exec {shutil.which("c++")} "$@"')
    environment = os.environ | {"BATON_CACHE": str(tmp_path / "cache"), "CXX": wrapped}
    code = (
        f"from baton.kernels.runtime.cpp.prepare import prepare; found = prepare({OPERATIONS}); "
        "print(found.problem or found.compiled)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert sorted(process.communicate(timeout=120)[0].strip() for process in processes) == ["False", "True"]
    links = [line for line in log.read_text().splitlines() if "-shared" in line]
    assert len(links) == len(list((tmp_path / "cache").glob("*.so"))) == 1


def test_a_function_whose_check_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs() -> None:
        assert cpp.function("baton_use_threads") is not None
        torch.testing.assert_close(torch.tensor([1.0]), torch.tensor([2.0]))

    monkeypatch.setattr(library, "_declared", dict(library._declared))
    cpp.declare("baton_use_threads", [], differs)
    cpp.declare("baton_missing", [], lambda: None)
    left_out = cpp.install(library_for(), threads=1)
    assert sorted(left_out) == ["baton_missing", "baton_use_threads"]
    assert "not close" in left_out["baton_use_threads"]
    assert "undefined symbol" in left_out["baton_missing"]
    assert cpp.function("baton_use_threads") is None
    assert cpp.function(NAME) is not None
