from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.kernels.mamba2.state_update import cpu, reference
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.packing import Packed, assert_is_the_recurrence, random_inputs

FORMS = pytest.mark.parametrize(
    "form", [reference.selective_state_update, cpu.selective_state_update], ids=["reference", "cpu"]
)


@FORMS
@pytest.mark.parametrize(("rows", "heads", "groups"), [(1, 3, 1), (5, 6, 2), (16, 4, 4)])
def test_one_step_of_the_recurrence_in_place(form: Callable[..., Tensor], rows: int, heads: int, groups: int) -> None:
    slots = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(rows))[:rows]
    inputs = random_inputs(rows, rows + 3, rows, heads, groups)
    packed = Packed(list(range(rows + 1)), [7] * rows, slots.tolist(), [], rows + 3)
    pool = inputs.pool.clone()
    y = form(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D, pool, slots, slots)
    assert_is_the_recurrence(y, pool, inputs, packed)


@FORMS
def test_a_bfloat16_state_is_rounded_when_written_and_y_is_not(form: Callable[..., Tensor]) -> None:
    slots = torch.tensor([4, 0, 2])
    i = random_inputs(3, 5, 1)
    rounded = i.pool.bfloat16()
    exact = rounded.float()
    positions = slots * 1000
    y = form(i.x, i.dt, i.A, i.B, i.C, i.D, rounded, slots, positions)
    assert torch.equal(y, form(i.x, i.dt, i.A, i.B, i.C, i.D, exact, slots, positions))
    assert torch.equal(rounded[slots], round_stochastically(exact[slots], positions))
    assert torch.equal(rounded[[1, 3]], exact[[1, 3]].bfloat16())


def test_stochastic_rounding_is_unbiased_and_uncorrelated_between_positions_and_elements() -> None:
    """The states lie a third of the way from 1 to the next bfloat16, 1 + 2^-7, so one in three is rounded up."""
    states = torch.full((2000, 1, 4, 32), 1 + 2**-7 / 3)
    rounded = round_stochastically(states, torch.arange(2000) + 123_456)
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    up = (rounded > 1).float().view(2000, -1)
    assert abs(up.mean() - 1 / 3) < 4 * (2 / 9 / up.numel()) ** 0.5
    for series in (up, up.t()):
        assert (series.mean(1) - 1 / 3).abs().max() < 5 * (2 / 9 / series.shape[1]) ** 0.5
        centred = series - 1 / 3
        for lag in (1, 2, 7):
            correlation = (centred[lag:] * centred[:-lag]).mean() / (2 / 9)
            assert abs(correlation) < 4 / centred[lag:].numel() ** 0.5
    assert torch.equal(rounded[7:8], round_stochastically(states[7:8], torch.tensor([123_463])))


def test_bfloat16_numbers_are_not_changed_and_signs_zeros_infinities_and_nans_are_preserved() -> None:
    held = torch.tensor([0.0, -0.0, 1.5, -(2.0**-100), 3.0e38, torch.inf, -torch.inf]).bfloat16()
    positions = torch.arange(500)
    rounded = round_stochastically(held.float().expand(500, -1), positions)
    assert torch.equal(rounded.view(torch.int16), held.expand(500, -1).contiguous().view(torch.int16))
    negative = round_stochastically(torch.full((500, 1), -1 - 2**-9), positions)
    assert set(negative.flatten().tolist()) == {-1.0, -1 - 2**-7}
    made = torch.cat((torch.tensor([torch.inf]) - torch.inf, torch.tensor([0x7FFFFFFF]).int().view(torch.float32)))
    assert round_stochastically(made.expand(500, 2), positions).isnan().all()
