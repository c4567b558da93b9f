"""scripts/bench products: both sides compute the same, with the same instructions."""

import pytest
import torch

from baton.kernels.linear.quantized import Groups
from baton.kernels.linear.quantized.native import random_groups
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.targets import TARGETS
from baton.models.gguf.blocks import BLOCKS
from scripts.benchmarks.parts import products
from scripts.benchmarks.parts.libraries import Calls, Library, agree, in_turns
from tests.kernels.installed import installed
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


def installed_library() -> Library:
    file = cpp.installed_file()
    assert file is not None
    return Library(file, 1)


@pytest.mark.parametrize("kind", ["int4", "compressed"])
def test_two_libraries_make_the_same_calls_in_turns(kind: str) -> None:
    x = torch.randn(3, 512).bfloat16()
    with installed():
        libraries = installed_library(), installed_library()
        native_form, _ = products.forms(kind, 512, 96)
        calls = Calls(native_form, x, 24)
        assert all(result.equal(native_form(x)) for result in calls.results(libraries[1]))
        assert agree(calls, *libraries)
        assert len(in_turns(calls, libraries, 3)) == 3


def test_results_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 512).bfloat16()
    with installed():
        library, idle = installed_library(), installed_library()
        monkeypatch.setattr(idle, "function", lambda name: lambda *arguments: None)
        calls = Calls(products.forms("int4", 512, 96)[0], x, 2)
        assert not agree(calls, library, idle)
        before = calls.results(library)
        x += 1
        assert not any(map(torch.equal, before, calls.results(library)))


def test_torch_is_limited_for_each_target() -> None:
    assert set(products.LIMITS) == {target.name for target in TARGETS if target.machine == "x86_64"}
