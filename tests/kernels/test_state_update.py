from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.state_update import cpu, reference
from tests.kernels.packing import Packed, random_inputs, recurrence


@pytest.mark.parametrize(
    "form", [reference.selective_state_update, cpu.selective_state_update], ids=["reference", "cpu"]
)
@pytest.mark.parametrize(("rows", "heads", "groups"), [(1, 3, 1), (5, 6, 2), (16, 4, 4)])
def test_one_step_of_the_recurrence_in_place(form: Callable[..., Tensor], rows: int, heads: int, groups: int) -> None:
    slots = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(rows))[:rows]
    inputs = random_inputs(rows, rows + 3, rows, heads, groups)
    packed = Packed(list(range(rows + 1)), [7] * rows, slots.tolist(), [], rows + 3)
    expected_y, expected_pool = recurrence(inputs, packed)
    pool = inputs.pool
    y = form(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D, pool, slots)
    torch.testing.assert_close(y, expected_y.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool, expected_pool.float(), atol=1e-5, rtol=1e-5)
