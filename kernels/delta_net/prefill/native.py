"""The operations of reference.py in C++ (cpu.cpp): convolution, scan, norm and gate in one call."""

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.prefill import reference
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME, KDA = "baton_delta_prefill", "baton_kda_prefill"
POOLS = (POINTER, INT64, INT, POINTER, INT64)
PLAN = (INT64, INT64, *(POINTER,) * 5)
ARGUMENTS = [*(INT, POINTER, INT64), *(POINTER,) * 5, FLOAT, FLOAT, *POOLS, *PLAN, POINTER, *(INT64,) * 5]
KDA_ARGUMENTS = [INT, *(POINTER, INT64) * 3, *(POINTER,) * 4, FLOAT, FLOAT, *POOLS, *PLAN, POINTER, *(INT64,) * 4]


def takes(projected: Tensor, constants: DeltaConstants, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Return whether the C function is installed and takes these arguments of delta_prefill."""
    return cpp.function(NAME) is not None and _types_fit(projected, conv_pool, state_pool)


def takes_kda(
    projected: Tensor, forget: Tensor, gate: Tensor, constants: KdaConstants, conv_pool: Tensor, state_pool: Tensor
) -> bool:
    """Return whether the C function is installed and takes these arguments of kda_prefill."""
    same = projected.dtype == forget.dtype == gate.dtype
    return cpp.function(KDA) is not None and same and _types_fit(projected, conv_pool, state_pool)


def _types_fit(projected: Tensor, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Return whether tensors are on the CPU and of dtypes that the C functions take."""
    return (
        projected.is_cpu and projected.dtype in TYPES and conv_pool.dtype == torch.float32 and state_pool.dtype in TYPES
    )


def delta_prefill(
    projected: Tensor, constants: DeltaConstants, conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan
) -> Tensor:
    """Compute reference.delta_prefill. Raise ValueError for layouts that the C function does not take.

    The pools and `projected` may be strided in their first dimension.
    """
    heads, width, size = state_pool.shape[1:]
    run, c, (kernel, channels) = cpp.function(NAME), constants, constants.taps.shape
    assert run is not None
    inner, key_heads = heads * width, c.key_heads
    _check_layouts([(projected, inner + channels + 2 * heads)], c, conv_pool, state_pool, plan)
    if channels != inner + 2 * key_heads * size or heads % key_heads:
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} and {key_heads} of keys of {size}")
    y = torch.empty(plan.tokens, inner, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(c.taps.data_ptr(), None if c.conv_bias is None else c.conv_bias.data_ptr()),
        *(c.dt_bias.data_ptr(), c.A.data_ptr(), c.norm.data_ptr(), c.eps, c.beta_scale),
        *_pools_and_plan(conv_pool, state_pool, plan),
        y.data_ptr(),
        *(heads, width, key_heads, size, kernel),
    )
    return y


def kda_prefill(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
) -> Tensor:
    """Compute reference.kda_prefill. Raise ValueError for layouts that the C function does not take.

    The pools and the projections may be strided in their first dimension.
    """
    heads, width, size = state_pool.shape[1:]
    run, c, (kernel, channels) = cpp.function(KDA), constants, constants.taps.shape
    assert run is not None
    columns = [(projected, channels + heads), (forget, heads * size), (gate, heads * width)]
    _check_layouts(columns, constants, conv_pool, state_pool, plan)
    if channels != heads * (2 * size + width):
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} with keys of {size}")
    y = torch.empty(plan.tokens, heads * width, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(forget.data_ptr(), forget.stride(0), gate.data_ptr(), gate.stride(0)),
        *(c.taps.data_ptr(), c.dt_bias.data_ptr(), c.A.data_ptr(), c.norm.data_ptr()),
        *(c.eps, c.lower_bound or 0.0),
        *_pools_and_plan(conv_pool, state_pool, plan),
        y.data_ptr(),
        *(heads, width, size, kernel),
    )
    return y


def _pools_and_plan(conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan) -> tuple[int, ...]:
    """Return the C function's arguments for the pools and the plan, in the order that POOLS and PLAN declare."""
    table = plan.table
    return (
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(len(table.slots), len(table.starts) - 1),
        *(t.data_ptr() for t in (table.slots, table.first, table.starts, table.saves, table.saved)),
    )


def _check_layouts(
    columns: list[tuple[Tensor, int]],
    c: DeltaConstants | KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
) -> None:
    """Raise ValueError unless each tensor has the expected shape and contiguous rows or slots.

    columns: each projection with its expected number of columns.
    """
    kernel, channels = c.taps.shape
    layouts = [
        *((tensor, (plan.tokens, count)) for tensor, count in columns),
        (conv_pool, (len(conv_pool), kernel - 1, channels)),
        (state_pool, state_pool.shape),
    ]
    for tensor, shape in layouts:
        if tensor.shape != shape or not tensor[:1].is_contiguous():
            raise ValueError(f"{tuple(tensor.shape)} with strides {tensor.stride()} is not {tuple(shape)}")


def check() -> None:
    """Raise AssertionError if delta_prefill differs from its reference."""
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
        beta_scale=2.0,
    )
    plan = plan_prefill([0, 90, 92], [0, 7], [2, 0], [(0, 71, 3)], 64, 4, torch.device("cpu"))
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    for dtype, state_dtype in product(TYPES, TYPES):
        projected = torch.randn(plan.tokens, inner + channels + 2 * heads, generator=g).to(dtype)
        found, expected = ((pools[0].clone(), pools[1].to(state_dtype, copy=True)) for _ in range(2))
        y = delta_prefill(projected, constants, *found, plan)
        exact = reference.delta_prefill(projected, constants, *expected, plan)
        _assert_agree((y, *found), (exact, *expected))


def check_kda() -> None:
    """Raise AssertionError if kda_prefill differs from its reference."""
    heads, width, size = 2, 20, 37
    channels, g = heads * (2 * size + width), torch.Generator().manual_seed(0)
    constants = KdaConstants(
        taps=torch.randn(4, channels, generator=g),
        dt_bias=torch.randn(heads * size, generator=g),
        A=-torch.rand(heads, generator=g),
        norm=torch.randn(width, generator=g),
        eps=0.1,
    )
    plan = plan_prefill([0, 90, 92], [0, 7], [2, 0], [(0, 71, 3)], 64, 4, torch.device("cpu"))
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    for dtype, state_dtype, lower_bound in product(TYPES, TYPES, (None, -5.0)):
        columns = (channels + heads, heads * size, heads * width)
        projected, forget, gate = (torch.randn(plan.tokens, count, generator=g).to(dtype) for count in columns)
        inputs = (projected, forget, gate, replace(constants, lower_bound=lower_bound))
        found, expected = ((pools[0].clone(), pools[1].to(state_dtype, copy=True)) for _ in range(2))
        y, exact = kda_prefill(*inputs, *found, plan), reference.kda_prefill(*inputs, *expected, plan)
        _assert_agree((y, *found), (exact, *expected))


def _assert_agree(found: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    """Raise AssertionError if results, convolution pools or state pools differ by more than rounding."""
    (y, conv, state), (exact, exact_conv, exact_state) = found, expected
    # AMX rounds operands of products if activations are bfloat16: errors are relative to the largest result.
    rounds = y.dtype != torch.float32
    tolerance = 0.02 if rounds else 1e-4
    of_state = 1e-4 if state.dtype == y.dtype == torch.float32 else 0.02
    assert_agrees(y, exact, rtol=tolerance, atol=tolerance * (float(exact.abs().max()) if rounds else 1))
    assert_agrees(conv, exact_conv, rtol=1e-4, atol=1e-4)
    scale = float(exact_state.abs().max()) if rounds else 1
    assert_agrees(state, exact_state, rtol=of_state, atol=tolerance * scale)


cpp.declare(NAME, ARGUMENTS, check)
cpp.declare(KDA, KDA_ARGUMENTS, check_kda)
