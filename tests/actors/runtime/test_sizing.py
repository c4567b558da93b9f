"""How memory is divided between slots and pages, and the reasons that the result states."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from baton.actors.cache.worth.order import Costs
from baton.actors.runtime.sizing import (
    DEFAULT_MEMORY_FRACTION,
    PoolSizes,
    SizingError,
    costs_of,
    count_active_parameters,
    count_parameters,
    size_pools,
    weight_bytes,
)
from baton.actors.scheduler.strategy import Strategy
from baton.models.batch import TensorSpec
from baton.models.loading.checkpoint import random_model
from tests.models.oracle import GRANITE_MOE, MAMBA2

MIB = 1 << 20


@dataclass
class Shape:
    nbytes: int


class Sized:
    """A model with a state of 2 MiB and the given number of KiB of KV per token."""

    def __init__(self, token_kib: int) -> None:
        self._token = token_kib

    def state_specs(self) -> list[Shape]:
        return [Shape(MIB // 2), Shape(3 * MIB // 2)]

    def kv_specs(self) -> list[Shape]:
        return [Shape(512)] * (2 * self._token)


def size(token_kib: int, memory_mib: int, **more: Any) -> PoolSizes:
    arguments = {"max_running": 4, "max_model_len": 100, "page_size": 16} | more
    model: Any = Sized(token_kib)
    return size_pools(model, memory_mib * MIB, **arguments)


def test_without_attention_all_of_a_small_memory_is_slots() -> None:
    sizes = size(0, 21)
    assert (sizes.slots, sizes.slot_bytes, sizes.pages, sizes.page_bytes) == (10, 2 * MIB, 0, 0)
    assert sizes.max_running == 4
    assert sizes.why == [
        "10 slots: 21.0 MiB hold 10, 16 are useful",
        "10 requests fit: 10 slots less 0 for the tree, 1 a request (just_in_time)",
    ]


def test_with_attention_half_is_slots_and_what_they_leave_is_pages() -> None:
    sizes = size(64, 40)
    assert (sizes.slots, sizes.pages, sizes.page_bytes, sizes.page_size) == (10, 20, MIB, 16)
    assert sizes.why[:2] == ["10 slots: 20.0 MiB hold 10, 16 are useful", "20 pages: 20.0 MiB hold 20, 56 are useful"]


def test_pools_are_no_larger_than_can_be_used() -> None:
    """Useful slots: those of every request and three cached states each.

    Useful pages: two contexts each, plus a token.
    """
    sizes = size(64, 4000)
    assert (sizes.slots, sizes.pages) == (16, 4 * 7 * 2)
    assert size(64, 4000, max_model_len=111).pages == 4 * 7 * 2
    assert size(64, 4000, max_model_len=112).pages == 4 * 8 * 2
    assert size(0, 4000, strategy=Strategy.EXTRA_BUFFER).slots == 4 * (3 + 3)
    assert size(0, 4000, strategy=Strategy.EXTRA_BUFFER, overlap=False).slots == 4 * (2 + 3)


def test_fixed_numbers_of_slots_and_pages_are_respected() -> None:
    sizes = size(64, 0, slots=5, pages=7, tree_slots=2)
    assert (sizes.slots, sizes.pages, sizes.max_running) == (5, 7, 3)
    assert sizes.why == ["3 requests fit: 5 slots less 2 for the tree, 1 a request (just_in_time)"]
    assert size(0, 0, slots=5, pages=7).pages == 0


def test_memory_that_does_not_hold_one_request_is_an_error() -> None:
    assert size(0, 2).max_running == 1
    with pytest.raises(SizingError, match=r"it needs 3 slots of 2\.0 MiB \(extra_buffer\), and there are 3, 1 of them"):
        size(0, 0, slots=3, tree_slots=1, strategy=Strategy.EXTRA_BUFFER)
    assert size(64, 0, slots=1, pages=2, page_size=1).pages == 2
    with pytest.raises(SizingError, match=r"there are no pages of 0\.1 MiB"):
        size(64, 0, slots=1, pages=1, page_size=1)
    assert size(64, 0, slots=1, pages=1, page_size=2).pages == 1


def test_the_default_leaves_memory_for_everything_else() -> None:
    assert 0.25 <= DEFAULT_MEMORY_FRACTION <= 0.75


class Weighed(torch.nn.Module):
    """A model of 300 parameters, whose state has 7 numbers and whose keys and values have 5 a token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(10, 30))

    def state_specs(self) -> list[TensorSpec]:
        return [TensorSpec((7,), torch.float32)]

    def kv_specs(self) -> list[TensorSpec]:
        return [TensorSpec((2,), torch.bfloat16), TensorSpec((3,), torch.bfloat16)]


def test_what_a_token_costs() -> None:
    weighed: Any = Weighed()
    assert costs_of(weighed) == Costs(compute=600, attend=10, slot=28, token=10)
    table: Any = type("Table", (), {"state_specs": Weighed.state_specs, "kv_specs": Weighed.kv_specs})()
    assert costs_of(table) == Costs(compute=1, attend=0, slot=28, token=10), "of one without weights tokens count"


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize(("family", "shape"), [("mamba2", MAMBA2), ("granitemoehybrid", GRANITE_MOE)])
def test_parameters_count_once_however_they_are_laid_out(family: str, shape: dict[str, Any], bits: int | None) -> None:
    config = {"model_type": family, "vocab_size": 300, **shape}
    plain = random_model(config, torch.float32, torch.device("cpu"), seed=0)
    packed = random_model(config, torch.float32, torch.device("cpu"), seed=0, bits=bits)
    assert isinstance(plain, nn.Module) and isinstance(packed, nn.Module)
    assert count_parameters(packed) == sum(tensor.numel() for tensor in plain.parameters())
    assert (weight_bytes(packed) < weight_bytes(plain)) == (bits is not None)


def test_a_token_uses_few_experts() -> None:
    """Each of 3 layers has 6 experts, and a token uses 2 of them, so 4 experts a layer are not active."""
    config = {"model_type": "granitemoehybrid", "vocab_size": 300, **GRANITE_MOE}
    model = random_model(config, torch.float32, torch.device("cpu"), seed=0)
    of_expert = 3 * GRANITE_MOE["hidden_size"] * GRANITE_MOE["intermediate_size"]
    assert count_active_parameters(model) == count_parameters(model) - 3 * 4 * of_expert
