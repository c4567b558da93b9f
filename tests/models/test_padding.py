"""Rows of padding, as in a captured step: no expert computes for them."""

import pytest
import torch
from torch import Tensor, nn

from baton.models.batch import Batch, Decode, allocate
from baton.models.layers import experts as layer
from baton.models.loading.checkpoint import random_model
from tests.models.oracle import CHECKPOINTS, settings_of

CPU = torch.device("cpu")
MOE = [name for name in CHECKPOINTS if "moe" in name.replace("granitemoehybrid", "")]


@torch.inference_mode()
@pytest.mark.parametrize("name", MOE)
def test_padding_has_no_experts_and_changes_no_other_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(settings_of(name), torch.float32, CPU, 0)
    assert isinstance(model, nn.Module)
    choices, run = list[Tensor](), layer.experts

    def watched(x: Tensor, chosen: Tensor, *rest: object) -> Tensor:
        choices.append(chosen)
        return run(x, chosen, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(layer, "experts", watched)
    found = []
    for padding in (None, torch.tensor([False, False, True, True])):
        pools = allocate(model, 4, 4, 16, CPU)
        table = torch.arange(4, dtype=torch.int32)[:, None]
        rows = Decode(torch.tensor([1, 0, 3, 3]), torch.zeros(4, dtype=torch.int64), table, padding)
        found.append(model.forward(Batch(torch.tensor([7, 9, 0, 0]), rows.positions, None, rows), pools)[:2])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    layers = sum(isinstance(module, layer.Experts) for module in model.modules())
    assert len(choices) == 2 * layers > 0
    assert all((chosen >= 0).all() for chosen in choices[:layers])
    assert all((chosen[:2] >= 0).all() and (chosen[2:] == -1).all() for chosen in choices[layers:])
