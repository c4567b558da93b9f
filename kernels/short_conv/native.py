"""The operations of reference.py in C++ (cpu.cpp): one call each."""

from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.kernels.drafts.native import FEED, check_rows, feed_arguments
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees
from baton.kernels.short_conv import reference
from baton.kernels.short_conv.constants import ShortConvConstants

PREFILL, DECODE = "baton_short_conv_prefill", "baton_short_conv_decode"
LAYER = (INT, POINTER, INT64, POINTER, POINTER, POINTER, INT64)
PREFILL_ARGUMENTS = [*LAYER, INT64, INT64, *(POINTER,) * 6, INT64, INT64]
DECODE_ARGUMENTS = [*LAYER, POINTER, POINTER, *FEED, INT64, INT64, INT64]
Shape = tuple[int, ...]


def takes(projected: Tensor, constants: ShortConvConstants, pool: Tensor) -> bool:
    """Return whether the C functions are installed and take these tensors."""
    return (
        cpp.function(PREFILL) is not None
        and cpp.function(DECODE) is not None
        and projected.is_cpu
        and projected.dtype in TYPES
        and pool.dtype == torch.float32
    )


def short_conv_prefill(projected: Tensor, constants: ShortConvConstants, pool: Tensor, plan: PrefillPlan) -> Tensor:
    """Compute reference.short_conv_prefill. Raise ValueError for layouts that the C function does not take.

    The pool and `projected` may be strided in their first dimension.
    """
    run, table = cpp.function(PREFILL), plan.table
    assert run is not None
    if len(projected) != plan.tokens:
        raise ValueError(f"{len(projected)} tokens for a plan of {plan.tokens}")
    kernel, channels = _sizes(projected, constants, pool)
    y = torch.empty(plan.tokens, channels, dtype=projected.dtype)
    run(
        *_layer(projected, constants, pool),
        *(len(table.slots), len(table.starts) - 1),
        *(t.data_ptr() for t in (table.slots, table.first, table.starts, table.saves, table.saved)),
        *(y.data_ptr(), channels, kernel),
    )
    return y


def short_conv_decode(
    projected: Tensor,
    constants: ShortConvConstants,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts | None = None,
    ring: Tensor | None = None,
) -> Tensor:
    """Compute reference.short_conv_decode, also where rows feed drafts. Raise ValueError as short_conv_prefill does."""
    run = cpp.function(DECODE)
    assert run is not None
    kernel, channels = _sizes(projected, constants, pool)
    check_rows(slots, positions)
    feed = feed_arguments(projected, len(slots), channels, drafts, ring)
    y = torch.empty(len(projected), channels, dtype=projected.dtype)
    run(
        *_layer(projected, constants, pool),
        *(slots.data_ptr(), y.data_ptr()),
        *(*feed, len(slots), channels, kernel),
    )
    return y


def _layer(projected: Tensor, c: ShortConvConstants, pool: Tensor) -> tuple[int | None, ...]:
    """Return the arguments that LAYER declares."""
    bias = None if c.bias is None else c.bias.data_ptr()
    of_input = TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)
    return *of_input, c.taps.data_ptr(), bias, pool.data_ptr(), pool.stride(0)


def _sizes(projected: Tensor, c: ShortConvConstants, pool: Tensor) -> tuple[int, int]:
    """Return the width and the channels of the convolution. Raise ValueError for tensors that do not fit together."""
    kernel, channels = c.taps.shape
    _check(kernel, channels, projected.shape[1:], projected.stride(), pool.shape[1:], pool.stride())
    return kernel, channels


@lru_cache(maxsize=1024)
def _check(kernel: int, channels: int, columns: Shape, strides: Shape, slot: Shape, slot_strides: Shape) -> None:
    """Raise ValueError unless rows of `projected` and slots are contiguous and have the expected sizes.

    Cached, because each step has the same layouts.
    """
    if columns != (3 * channels,) or strides[1] != 1:
        raise ValueError(f"rows {columns} with strides {strides} for {channels} channels")
    # The stride of a dimension of size 1 says nothing.
    if slot != (kernel - 1, channels) or slot_strides[2] != 1 or (kernel > 2 and slot_strides[1] != channels):
        raise ValueError(f"slots {slot} with strides {slot_strides} for {channels} channels and a width of {kernel}")


def check_prefill() -> None:
    """Raise AssertionError if short_conv_prefill differs from its reference."""
    plan = plan_prefill([0, 90, 92], [0, 7], [2, 0], [(0, 71, 3)], 64, 3, torch.device("cpu"))
    for (projected, constants, pool), tolerance in _drawn(plan.tokens):
        copy = pool.clone()
        y = short_conv_prefill(projected, constants, pool, plan)
        exact = reference.short_conv_prefill(projected, constants, copy, plan)
        assert_agrees(y, exact, rtol=tolerance, atol=tolerance)
        assert torch.equal(pool, copy)


def check_decode() -> None:
    """Raise AssertionError if short_conv_decode differs from its reference."""
    slots = torch.tensor([2, 0, 3])
    for (projected, constants, pool), tolerance in _drawn(len(slots)):
        copy = pool.clone()
        y = short_conv_decode(projected, constants, pool, slots, slots)
        exact = reference.short_conv_decode(projected, constants, copy, slots, slots)
        assert_agrees(y, exact, rtol=tolerance, atol=tolerance)
        assert torch.equal(pool, copy)


def _drawn(tokens: int) -> list[tuple[tuple[Tensor, ShortConvConstants, Tensor], float]]:
    """Return (projected, constants, pool), with a tolerance, for each dtype, with bias and without."""
    channels, g = 150, torch.Generator().manual_seed(0)
    taps, bias = torch.randn(3, channels, generator=g), torch.randn(channels, generator=g)
    projected, pool = torch.randn(tokens, 3 * channels, generator=g), torch.randn(4, 2, channels, generator=g)
    tolerances = zip(TYPES, (1e-5, 2**-7), strict=True)
    return [
        ((projected.to(dtype), ShortConvConstants(taps, added), pool.clone()), tolerance)
        for (dtype, tolerance), added in product(tolerances, (bias, None))
    ]


cpp.declare(PREFILL, PREFILL_ARGUMENTS, check_prefill)
cpp.declare(DECODE, DECODE_ARGUMENTS, check_decode)
