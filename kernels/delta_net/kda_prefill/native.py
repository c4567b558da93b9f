"""The same as reference.py, by cpu.cpp: convolution, scan, norm and gate in one call."""

from itertools import product

import torch
from torch import Tensor

from baton.kernels.delta_net.kda_constants import KdaConstants
from baton.kernels.delta_net.kda_prefill import reference
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_kda_prefill"
ARGUMENTS = [
    *(INT, POINTER, INT64, POINTER, INT64, POINTER, INT64),
    *(POINTER,) * 4,
    *(FLOAT, POINTER, INT64, INT, POINTER, INT64),
    *(INT64, INT64),
    *(POINTER,) * 6,
    *(INT64,) * 4,
]


def takes(
    projected: Tensor, forget: Tensor, gate: Tensor, constants: KdaConstants, conv_pool: Tensor, state_pool: Tensor
) -> bool:
    """Whether the C function is installed and made for these."""
    return (
        cpp.function(NAME) is not None
        and projected.device.type == "cpu"
        and projected.dtype == forget.dtype == gate.dtype
        and projected.dtype in TYPES
        and conv_pool.dtype == torch.float32
        and state_pool.dtype in TYPES
    )


def kda_prefill(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
) -> Tensor:
    """See reference.kda_prefill. Slots may lie apart, and rows of what is projected; ValueError for other layouts."""
    (heads, width, size), (kernel, channels) = state_pool.shape[1:], constants.taps.shape
    layouts = [
        (projected, (plan.tokens, channels + heads)),
        (forget, (plan.tokens, heads * size)),
        (gate, (plan.tokens, heads * width)),
        (conv_pool, (len(conv_pool), kernel - 1, channels)),
        (state_pool, (len(state_pool), heads, width, size)),
    ]
    for tensor, shape in layouts:
        if tensor.shape != shape or not tensor[:1].is_contiguous():
            raise ValueError(f"{tuple(tensor.shape)} with strides {tensor.stride()} is not {shape}")
    if channels != heads * (2 * size + width):
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} with keys of {size}")
    run, c, table = cpp.function(NAME), constants, plan.table
    assert run is not None
    y = torch.empty(plan.tokens, heads * width, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(forget.data_ptr(), forget.stride(0), gate.data_ptr(), gate.stride(0)),
        *(c.taps.data_ptr(), c.dt_bias.data_ptr(), c.A.data_ptr(), c.norm.data_ptr(), c.eps),
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(len(table.slots), len(table.starts) - 1),
        *(t.data_ptr() for t in (table.slots, table.first, table.starts, table.saves, table.saved)),
        y.data_ptr(),
        *(heads, width, size, kernel),
    )
    return y


def check() -> None:
    """Raises AssertionError where it differs from the reference."""
    heads, width, size, g = 2, 20, 37, torch.Generator().manual_seed(0)
    channels = heads * (2 * size + width)
    constants = KdaConstants(
        taps=torch.randn(4, channels, generator=g),
        dt_bias=torch.randn(heads * size, generator=g),
        A=-torch.rand(heads, generator=g),
        norm=torch.randn(width, generator=g),
        eps=0.1,
    )
    plan = plan_prefill([0, 90, 92], [0, 7], [2, 0], [(0, 71, 3)], 64, 4, torch.device("cpu"))
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    for dtype, state_dtype in product(TYPES, TYPES):
        columns = (channels + heads, heads * size, heads * width)
        projected, forget, gate = (torch.randn(plan.tokens, count, generator=g).to(dtype) for count in columns)
        given = (projected, forget, gate, constants)
        found, expected = ((pools[0].clone(), pools[1].to(state_dtype, copy=True)) for _ in range(2))
        y, exact = kda_prefill(*given, *found, plan), reference.kda_prefill(*given, *expected, plan)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        assert_agrees(y, exact, rtol=tolerance, atol=tolerance)
        assert_agrees(found[0], expected[0], rtol=1e-4, atol=1e-4)
        assert_agrees(found[1], expected[1], rtol=1e-4 if state_dtype == torch.float32 else 0.01, atol=1e-4)


cpp.declare(NAME, ARGUMENTS, check)
