"""scripts/bench products: both sides compute the same, with the same instructions."""

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.kernels.linear.quantized import Groups
from baton.kernels.linear.quantized.native import random_groups
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.targets import TARGETS
from baton.models.gguf.blocks import BLOCKS
from scripts.benchmarks.common.revisions import ROOT, check_out
from scripts.benchmarks.parts import libraries, products
from scripts.benchmarks.parts.libraries import Calls, Library, agree, in_turns, library_of, signature
from tests.kernels.installed import copying_compiler, installed, library_for, runnable
from tests.kernels.rounding import assert_rounded

# Relative error of the weights: of rounding bfloat16 results, or of integers; compressed weights lose nothing. Torch's
# weights of block formats are rounded to bfloat16. An input of 8 bits is off by a 254th of its group's largest at most.
ERRORS = {
    "float32": 1e-5,
    "bfloat16": 5e-3,
    "int8": 1e-2,
    "int4": 0.15,
    "compressed": 0,
    **dict.fromkeys(products.BLOCK_FORMATS, 1e-2),
    **dict.fromkeys([kind for kind in products.KINDS if kind.startswith(products.ROUNDED)], 2e-2),
}


@pytest.mark.parametrize("kind", products.KINDS)
def test_both_products_are_of_the_same_weights(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 512).to(torch.float32 if kind == "float32" else torch.bfloat16)
    with installed():
        ours, theirs = products.forms(kind, 512, 96)
        for _ in range(3):
            found, expected = ours(x).float(), theirs(x).float()
            assert (found - expected).norm() <= ERRORS[kind] * expected.norm()


@pytest.mark.parametrize("kind", products.BLOCK_FORMATS)
def test_products_of_block_formats_are_exact_to_their_rounding(kind: str) -> None:
    x, form = torch.randn(3, 512).bfloat16(), BLOCKS[kind].form
    groups = random_groups(form, 40, 512, torch.Generator().manual_seed(1))
    scaled = Groups(form, *groups.fields()[:3]).numbers().double()  # without the minima, which are terms of their own
    numbers = groups.numbers().double()
    size = x.double().abs() @ (scaled.abs() + (numbers - scaled).abs()).t()
    with installed():
        assert_rounded(products.by_integers([groups])(x), x.double() @ numbers.t(), 512 + 4, size)


def test_each_product_takes_other_weights_than_the_one_before() -> None:
    turns = products.in_turn([lambda x: x + 1, lambda x: x + 2])
    assert turns(torch.tensor(0)) != turns(torch.tensor(0))


class TimedLibrary(Library):
    """A library whose functions only advance a clock, and note that they were called."""

    def __init__(self, name: str, seconds: float, clock: SimpleNamespace) -> None:
        self._name, self._seconds, self._clock = name, seconds, clock

    def function(self, name: str) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            self._clock.now += self._seconds
            self._clock.calls.append(self._name)

        return run


@pytest.mark.parametrize("kind", ["int4", "compressed"])
def test_two_libraries_make_the_same_calls_in_turns(kind: str) -> None:
    x = torch.randn(3, 512).bfloat16()
    with installed():
        both = Library(library_for(), 1), Library(library_for(), 1)
        native_form, _ = products.forms(kind, 512, 96)
        calls = Calls(native_form, x, 24)
        assert all(result.equal(native_form(x)) for result in calls.results(both[1]))
        assert agree(calls, *both)
        assert len(in_turns(calls, both, 3)) == 3


def test_each_library_is_timed_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, calls=[])
    monkeypatch.setattr(libraries, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    with installed():
        calls = Calls(products.forms("int4", 512, 96)[0], torch.randn(3, 512).bfloat16(), 2)
    both = TimedLibrary("first", 1.0, clock), TimedLibrary("second", 2.0, clock)
    assert in_turns(calls, both, 3) == [(1.0, 2.0)] * 3
    first, second = ["first"] * 2, ["second"] * 2
    assert clock.calls == [*second, *first, *first, *second] * 2


def test_calls_keep_the_tensors_that_they_have_addresses_of() -> None:
    with installed():
        form, x = products.forms("int4", 512, 96)[0], torch.randn(3, 512).bfloat16()
        tensors = weakref.ref(form), weakref.ref(x)
        calls = Calls(form, x, 2)
        del form, x
        assert all(tensor() is not None for tensor in tensors)
        assert all(result.isfinite().all() for result in calls.results(Library(library_for(), 1)))


def test_results_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 512).bfloat16()
    with installed():
        library, idle = Library(library_for(), 1), Library(library_for(), 1)
        monkeypatch.setattr(idle, "function", lambda name: lambda *arguments: None)
        calls = Calls(products.forms("int4", 512, 96)[0], x, 2)
        assert not agree(calls, library, idle)
        before = calls.results(library)
        x += 1
        after = calls.results(library)
        assert all(result.isfinite().all() for result in (*before, *after))
        assert not any(map(torch.equal, before, after))


def test_a_revision_that_does_not_exist_ends_with_gits_message(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^nosuch: fatal: .*nosuch"):
        check_out("nosuch", "kernels", tmp_path)


def test_functions_that_a_revision_lacks_or_declares_otherwise_are_refused() -> None:
    name, other = "baton_linear", "baton_look_up"
    library = Library(library_for(), 1, "old", {name: signature(name)[1:], other: signature(other)})
    library.function(other)
    with pytest.raises(SystemExit, match=f"old: {name} has other types of arguments"):
        library.function(name)
    with pytest.raises(SystemExit, match="old has no function baton_nosuch"):
        library.function("baton_nosuch")


def test_a_library_is_built_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(copying_compiler(tmp_path)))
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    with pytest.raises(SystemExit, match=r"^old: native code for v9 cannot be built: no such target"):
        library_of("old", tmp_path, "v9", 1)
    library = library_of("old", tmp_path, runnable()[0].name, 1)
    for name in cpp.declared(["linear.dense", "linear.quantized", "linear.compressed", "linear.int8_activations"]):
        library.function(name)


def test_torch_is_limited_for_each_target() -> None:
    assert set(products.LIMITS) == {target.name for target in TARGETS if target.machine == "x86_64"}
