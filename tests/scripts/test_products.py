"""scripts/bench products: both sides compute the same, with the same instructions."""

import pytest
import torch

from baton.kernels.runtime.cpp.targets import TARGETS
from scripts.benchmarks.parts import products
from tests.kernels.installed import installed

# Relative error of the weights: of rounding bfloat16 results, or of integers; compressed weights lose nothing.
ERRORS = {"float32": 1e-5, "bfloat16": 5e-3, "int8": 1e-2, "int4": 0.15, "compressed": 0}


@pytest.mark.parametrize("kind", products.KINDS)
def test_both_products_are_of_the_same_weights(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 512).to(torch.float32 if kind == "float32" else torch.bfloat16)
    with installed():
        ours, theirs = products.forms(kind, 512, 96)
        for _ in range(3):
            found, expected = ours(x).float(), theirs(x).float()
            assert (found - expected).norm() <= ERRORS[kind] * expected.norm()


def test_each_product_takes_other_weights_than_the_one_before() -> None:
    turns = products.in_turn([lambda x: x + 1, lambda x: x + 2])
    assert turns(torch.tensor(0)) != turns(torch.tensor(0))


def test_torch_is_limited_for_each_target() -> None:
    assert set(products.LIMITS) == {target.name for target in TARGETS if target.machine == "x86_64"}
