"""The operation of reference.py in C++ (cpu.cpp): one call, and one pass over the states."""

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.kernels.drafts.native import FEED, check_rows, feed_arguments
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.decode import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_mixer_decode"
ARGUMENTS = [
    *(INT, POINTER, INT64),
    *(POINTER,) * 6,
    *(FLOAT, FLOAT, FLOAT, INT),
    *(POINTER, INT64, INT, POINTER, INT64),
    *(POINTER, POINTER, POINTER, INT64),
    *FEED,
    *(INT64,) * 8,
    POINTER,
]
Shape = tuple[int, ...]


def takes(projected: Tensor, constants: MixerConstants, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    return (
        cpp.function(NAME) is not None
        and projected.device.type == "cpu"
        and projected.dtype in TYPES
        and conv_pool.dtype == torch.float32
        and state_pool.dtype in TYPES
        and state_pool.shape[1] % constants.norm_groups == 0
    )


def mixer_decode(
    projected: Tensor,
    constants: MixerConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts | None = None,
    ring: Tensor | None = None,
) -> Tensor:
    """Compute reference.mixer_decode. Raise ValueError for layouts that the C function does not take.

    The pools and `projected` may be strided in their first dimension.
    """
    run, c = cpp.function(NAME), constants
    assert run is not None
    dimensions = _dimensions(
        c.taps.shape,
        *(projected.shape, projected.stride()),
        *(conv_pool.shape, conv_pool.stride()),
        *(state_pool.shape, state_pool.stride()),
    )
    rows, inner = len(slots), dimensions[0] * dimensions[1]
    check_rows(slots, positions)
    feed = feed_arguments(projected, rows, projected.shape[1] - inner, drafts, ring)
    y = torch.empty(len(projected), inner, dtype=projected.dtype)
    tokens = rows if drafts is None else drafts.tokens
    scratch = torch.empty(tokens, projected.shape[1], dtype=torch.float32)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(c.taps.data_ptr(), None if c.conv_bias is None else c.conv_bias.data_ptr()),
        *(c.A.data_ptr(), c.D.data_ptr(), c.dt_bias.data_ptr()),
        *(None if c.norm is None else c.norm.data_ptr(), *c.dt_limits, c.eps, c.norm_before_gate),
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(slots.data_ptr(), positions.data_ptr(), y.data_ptr(), inner),
        *(*feed, rows, tokens),
        *dimensions,
        *(c.norm_groups, scratch.data_ptr()),
    )
    return y


@lru_cache(maxsize=1024)
def _dimensions(
    taps: Shape, projected: Shape, rows: Shape, conv_pool: Shape, conv: Shape, state_pool: Shape, state: Shape
) -> tuple[int, int, int, int, int]:
    """Check layouts, and return heads, width, groups, state size and kernel width.

    Cached, because each step has the same layouts.

    taps, projected, conv_pool, state_pool: shapes. rows, conv, state: the strides of projected, conv_pool and
        state_pool.
    """
    (kernel, channels), (heads, width, size) = taps, state_pool[1:]
    inner = heads * width
    groups = (channels - inner) // (2 * size)
    if groups < 1 or channels != inner + 2 * groups * size or heads % groups:
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} and states of {size}")
    layouts = {
        "projected": (projected[1:], rows[1:], (inner + channels + heads,)),
        "the convolution's pool": (conv_pool[1:], conv[1:], (kernel - 1, channels)),
        "the pool of states": (state_pool[1:], state[1:], (heads, width, size)),
    }
    for name, (shape, strides, expected) in layouts.items():
        if shape != expected or not _is_contiguous(shape, strides):
            raise ValueError(f"a row of {name} is {shape} with strides {strides}, not a contiguous {expected}")
    return heads, width, groups, size, kernel


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Return whether a tensor of this shape and these strides is contiguous."""
    return all(shape[i] == 1 or strides[i] == prod(shape[i + 1 :]) for i in range(len(shape)))


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    heads, width, size, groups, slots = 4, 20, 37, 2, torch.tensor([2, 0, 3])
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
        eps=1e-5,
        dt_limits=(0.0, float("inf")),
    )
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    orders = [constants, replace(constants, norm_before_gate=True), replace(constants, norm=None)]
    for c, dtype, state_dtype in product(orders, TYPES, TYPES):
        projected = torch.randn(len(slots), inner + channels + heads, generator=g).to(dtype)
        found, expected = ([pools[0].clone(), pools[1].to(state_dtype, copy=True)] for _ in range(2))
        y = mixer_decode(projected, c, found[0], found[1], slots, slots)
        exact = reference.mixer_decode(projected, c, expected[0], expected[1], slots, slots)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        assert_agrees(y, exact, rtol=tolerance, atol=tolerance)
        assert_agrees(found[0], expected[0], rtol=1e-4, atol=1e-4)
        assert_agrees(found[1], expected[1], rtol=1e-4 if state_dtype == torch.float32 else 0.01, atol=1e-4)


cpp.declare(NAME, ARGUMENTS, check)
