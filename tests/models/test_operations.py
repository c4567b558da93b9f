"""What a model says that it computes with, against what it asks for."""

from collections.abc import Iterator

import pytest
import torch

from baton.kernels.runtime import cpp
from baton.models.layers.operations import operations
from baton.models.loading.checkpoint import random_model
from tests.kernels.installed import installed
from tests.models.oracle import CHECKPOINTS, settings_of
from tests.models.test_parity import decode, ids, make_pools, pages, prefill

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def native_kernels() -> Iterator[None]:
    with installed():
        yield


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_no_function_is_asked_for_that_is_not_compiled(
    name: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, function = set[str](), cpp.function

    def told(name: str) -> cpp.Function | None:
        asked.add(name)
        return function(name)

    monkeypatch.setattr(cpp, "function", told)
    model = random_model(settings_of(name), torch.bfloat16, CPU, 0, bits=bits)
    pools, table, tokens = make_pools(model, 1, 1), pages(1), ids(41)
    model.logits(model.forward(prefill(tokens[:40], 0, 0, table), pools))
    model.logits(model.forward(decode(tokens[40:], [0], [40], table), pools))
    assert asked
    assert asked <= set(cpp.declared(operations(model, bits)))
