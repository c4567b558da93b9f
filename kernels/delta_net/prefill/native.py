"""The same as reference.py, by cpu.cpp: convolution, scan, norm and gate in one call."""

from itertools import product

import torch
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.prefill import reference
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_delta_prefill"
ARGUMENTS = [
    *(INT, POINTER, INT64),
    *(POINTER,) * 5,
    *(FLOAT, POINTER, INT64, INT, POINTER, INT64),
    *(INT64, INT64),
    *(POINTER,) * 6,
    *(INT64,) * 5,
]


def takes(projected: Tensor, constants: DeltaConstants, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Whether the C function is installed and made for these."""
    return (
        cpp.function(NAME) is not None
        and projected.device.type == "cpu"
        and projected.dtype in TYPES
        and conv_pool.dtype == torch.float32
        and state_pool.dtype in TYPES
    )


def delta_prefill(
    projected: Tensor, constants: DeltaConstants, conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan
) -> Tensor:
    """See reference.delta_prefill. Slots may lie apart, and rows of `projected`; ValueError for other layouts."""
    heads, width, size = state_pool.shape[1:]
    (kernel, channels), inner, key_heads = constants.taps.shape, heads * width, constants.key_heads
    layouts = [
        (projected, (plan.tokens, inner + channels + 2 * heads)),
        (conv_pool, (len(conv_pool), kernel - 1, channels)),
        (state_pool, (len(state_pool), heads, width, size)),
    ]
    for tensor, shape in layouts:
        if tensor.shape != shape or not tensor[:1].is_contiguous():
            raise ValueError(f"{tuple(tensor.shape)} with strides {tensor.stride()} is not {shape}")
    if channels != inner + 2 * key_heads * size or heads % key_heads:
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} and {key_heads} of keys of {size}")
    run, c, table = cpp.function(NAME), constants, plan.table
    assert run is not None
    y = torch.empty(plan.tokens, inner, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(c.taps.data_ptr(), None if c.conv_bias is None else c.conv_bias.data_ptr()),
        *(c.dt_bias.data_ptr(), c.A.data_ptr(), c.norm.data_ptr(), c.eps),
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(len(table.slots), len(table.starts) - 1),
        *(t.data_ptr() for t in (table.slots, table.first, table.starts, table.saves, table.saved)),
        y.data_ptr(),
        *(heads, width, key_heads, size, kernel),
    )
    return y


def check() -> None:
    """Raises AssertionError where it differs from the reference."""
    heads, width, key_heads, size = 4, 20, 2, 37
    inner, channels = heads * width, heads * width + 2 * key_heads * size
    g = torch.Generator().manual_seed(0)
    constants = DeltaConstants(
        taps=torch.randn(4, channels, generator=g),
        conv_bias=torch.randn(channels, generator=g),
        dt_bias=torch.randn(heads, generator=g),
        A=-torch.rand(heads, generator=g),
        norm=torch.randn(width, generator=g),
        key_heads=key_heads,
        eps=0.1,
    )
    plan = plan_prefill([0, 90, 92], [0, 7], [2, 0], [(0, 71, 3)], 64, 4, torch.device("cpu"))
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    for dtype, state_dtype in product(TYPES, TYPES):
        projected = torch.randn(plan.tokens, inner + channels + 2 * heads, generator=g).to(dtype)
        found, expected = ([pools[0].clone(), pools[1].to(state_dtype, copy=True)] for _ in range(2))
        y = delta_prefill(projected, constants, found[0], found[1], plan)
        exact = reference.delta_prefill(projected, constants, expected[0], expected[1], plan)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        assert_agrees(y, exact, rtol=tolerance, atol=tolerance)
        assert_agrees(found[0], expected[0], rtol=1e-4, atol=1e-4)
        assert_agrees(found[1], expected[1], rtol=1e-4 if state_dtype == torch.float32 else 0.01, atol=1e-4)


cpp.declare(NAME, ARGUMENTS, check)
