"""Libraries that a wheel brings: which of them is used, with which checks, and when the compiler is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.kernels.norm.rms import add_rms_norm
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import library
from baton.kernels.runtime.cpp.build import build, prebuilt_key
from baton.kernels.runtime.cpp.cache import store
from baton.kernels.runtime.cpp.prepare import Prepared, prepare
from baton.kernels.runtime.cpp.targets import TARGETS, Target
from tests.kernels.installed import compiler, runnable

NAME = "baton_add_rms_norm"
OPERATIONS = {"norm.rms"}  # one operation is enough here, and compiles quickly
PREPARE = "baton.kernels.runtime.cpp.prepare"


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    cpp.uninstall()
    yield
    cpp.uninstall()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a library with one operation, for a target that every machine of this architecture has."""
    path = tmp_path_factory.mktemp("built") / "library"
    build(compiler(), runnable()[-1], path, OPERATIONS)
    return path.read_bytes()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which this test's libraries of a wheel are; this machine has no compiler."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(f"{PREPARE}.PREBUILT", folder)
    monkeypatch.setattr(f"{PREPARE}.find_compiler", lambda: None)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return folder


def add(folder: Path, target: Target, content: bytes) -> Path:
    new = folder / "new"
    new.write_bytes(content)
    return store(new, prebuilt_key(target))


def prepared() -> Prepared:
    found = prepare(OPERATIONS)
    found.install(threads=1)
    return found


def test_the_best_target_s_library_is_used_and_nothing_is_cached(wheel: Path, content: bytes) -> None:
    paths = [add(wheel, target, content) for target in runnable()]
    found = prepared()
    assert (found.problem, found.prebuilt, found.compiled, found.compiler) == ("", True, False, None)
    assert (found.target, found.path) == (runnable()[0], paths[0])
    assert cpp.function(NAME) is not None
    add_rms_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-5)
    assert not (wheel.parent / "cache").exists()


def test_a_chosen_target_is_used(wheel: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in runnable():
        add(wheel, target, content)
    monkeypatch.setenv("BATON_TARGET", runnable()[-1].name)
    found = prepared()
    assert (found.prebuilt, found.target) == (True, runnable()[-1])


def test_a_function_of_a_wheel_whose_check_fails_is_left_out(
    wheel: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs() -> None:
        raise AssertionError("it differs from its reference by 1")

    add(wheel, runnable()[0], content)
    declared = library._declared[NAME]
    monkeypatch.setitem(library._declared, NAME, library.Declared(declared.module, declared.argtypes, differs))
    found = prepared()
    assert (found.prebuilt, found.left_out[NAME]) == (True, "it differs from its reference by 1")
    assert cpp.function(NAME) is None


@pytest.mark.parametrize("fault", ["damaged", "of other sources"])
def test_a_library_that_does_not_match_is_not_used(
    wheel: Path, content: bytes, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add(wheel, runnable()[0], content)
    if fault == "damaged":
        path.write_bytes(content[:-1])
    else:
        monkeypatch.setattr(f"{PREPARE}.prebuilt_key", lambda target: f"{target.name}-other")
    found = prepared()
    assert (found.prebuilt, found.path) == (False, None)
    assert "no C++ compiler" in found.problem


def test_a_library_that_cannot_be_loaded_is_built_instead(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(wheel, runnable()[0], b"no library")
    assert "no C++ compiler" in prepared().problem
    monkeypatch.setattr(f"{PREPARE}.find_compiler", compiler)
    found = prepared()
    assert (found.prebuilt, found.compiled, found.problem) == (False, True, "")
    assert cpp.function(NAME) is not None


def test_a_compiler_is_preferred_to_a_lesser_target(
    wheel: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, lesser = runnable()[0], next(target for target in TARGETS if target not in runnable()[:1])
    monkeypatch.setattr(f"{PREPARE}.targets_here", lambda: [best, lesser])
    add(wheel, lesser, content)
    assert (prepared().prebuilt, prepared().target) == (True, lesser)
    monkeypatch.setattr(f"{PREPARE}.find_compiler", compiler)
    found = prepared()
    assert (found.prebuilt, found.compiled, found.target) == (False, True, best)


def test_the_key_depends_on_the_target_and_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({prebuilt_key(target) for target in TARGETS}) == len(TARGETS)
    monkeypatch.setattr("baton.kernels.runtime.cpp.build.KERNELS", tmp_path)
    header = tmp_path / "numbers.h"
    header.write_text("a")
    before = prebuilt_key(TARGETS[0])
    header.write_text("b")
    assert prebuilt_key(TARGETS[0]) != before
