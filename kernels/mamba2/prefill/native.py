"""The operation of reference.py in C++ (cpu.cpp): convolution, scan, gate and norm in one call."""

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.prefill import reference
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_mixer_prefill"
ARGUMENTS = [
    *(INT, POINTER, INT64),
    *(POINTER,) * 6,
    *(FLOAT, FLOAT, FLOAT, INT),
    *(POINTER, INT64, INT, POINTER, INT64),
    *(INT64, INT64),
    *(POINTER,) * 6,
    *(INT64,) * 6,
]


def takes(projected: Tensor, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    return (
        cpp.function(NAME) is not None
        and projected.device.type == "cpu"
        and projected.dtype in TYPES
        and conv_pool.dtype == torch.float32
        and state_pool.dtype in TYPES
    )


def mixer_prefill(
    projected: Tensor, constants: MixerConstants, conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan
) -> Tensor:
    """Compute reference.mixer_prefill. Raise ValueError for layouts that the C function does not take.

    The pools and `projected` may be strided in their first dimension.
    """
    heads, width, size = state_pool.shape[1:]
    (kernel, channels), inner = constants.taps.shape, heads * width
    groups = (channels - inner) // (2 * size)
    layouts = [
        (projected, (plan.tokens, inner + channels + heads)),
        (conv_pool, (len(conv_pool), kernel - 1, channels)),
        (state_pool, (len(state_pool), heads, width, size)),
    ]
    for tensor, shape in layouts:
        if tensor.shape != shape or not tensor[:1].is_contiguous():
            raise ValueError(f"{tuple(tensor.shape)} with strides {tensor.stride()} is not {shape}")
    if channels != inner + 2 * groups * size or heads % groups or inner % constants.norm_groups:
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} and states of {size}")
    run, c, table = cpp.function(NAME), constants, plan.table
    assert run is not None
    y = torch.empty(plan.tokens, inner, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(c.taps.data_ptr(), None if c.conv_bias is None else c.conv_bias.data_ptr()),
        *(c.A.data_ptr(), c.D.data_ptr(), c.dt_bias.data_ptr()),
        *(None if c.norm is None else c.norm.data_ptr(), *c.dt_limits, c.eps, c.norm_before_gate),
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(len(table.slots), len(table.starts) - 1),
        *(t.data_ptr() for t in (table.slots, table.first, table.starts, table.saves, table.saved)),
        y.data_ptr(),
        *(heads, width, groups, c.norm_groups, size, kernel),
    )
    return y


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    heads, width, size, groups = 4, 20, 37, 2
    inner, channels = heads * width, heads * width + 2 * groups * size
    g = torch.Generator().manual_seed(0)
    constants = MixerConstants(
        taps=torch.randn(4, channels, generator=g),
        conv_bias=torch.randn(channels, generator=g),
        dt_bias=torch.randn(heads, generator=g),
        A=-torch.rand(heads, generator=g),
        D=torch.randn(heads, generator=g),
        norm=torch.randn(inner, generator=g),
        norm_groups=groups,
        eps=0.1,
        dt_limits=(0.0, float("inf")),
    )
    plan = plan_prefill([0, 90, 92], [0, 7], [2, 0], [(0, 71, 3)], 64, 4, torch.device("cpu"))
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    orders = [constants, replace(constants, norm_before_gate=True), replace(constants, norm=None)]
    for c, dtype, state_dtype in product(orders, TYPES, TYPES):
        projected = torch.randn(plan.tokens, inner + channels + heads, generator=g).to(dtype)
        found, expected = ([pools[0].clone(), pools[1].to(state_dtype, copy=True)] for _ in range(2))
        y = mixer_prefill(projected, c, found[0], found[1], plan)
        exact = reference.mixer_prefill(projected, c, expected[0], expected[1], plan)
        # AMX rounds operands of products if activations are bfloat16: errors are relative to the largest result.
        rounds = dtype != torch.float32
        tolerance = 0.02 if rounds else 1e-4
        of_state = 1e-4 if state_dtype == dtype == torch.float32 else 0.02
        assert_agrees(y, exact, rtol=tolerance, atol=tolerance * (float(exact.abs().max()) if rounds else 1))
        assert_agrees(found[0], expected[0], rtol=1e-4, atol=1e-4)
        scale = float(expected[1].abs().max()) if rounds else 1
        assert_agrees(found[1], expected[1], rtol=of_state, atol=tolerance * scale)


cpp.declare(NAME, ARGUMENTS, check)
