"""The same as reference.py, by cpu.cpp: one call, and one pass over the states."""

from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.decode import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_delta_decode"
ARGUMENTS = [
    *(INT, POINTER, INT64),
    *(POINTER,) * 5,
    *(FLOAT, POINTER, INT64, INT, POINTER, INT64),
    *(POINTER, POINTER, POINTER, INT64, INT64),
    *(INT64,) * 5,
]
Shape = tuple[int, ...]


def takes(projected: Tensor, constants: DeltaConstants, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Whether the C function is installed and made for these."""
    return (
        cpp.function(NAME) is not None
        and projected.device.type == "cpu"
        and projected.dtype in TYPES
        and conv_pool.dtype == torch.float32
        and state_pool.dtype in TYPES
    )


def delta_decode(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See reference.delta_decode. Slots may lie apart, and rows of `projected`; ValueError for other layouts."""
    run, c = cpp.function(NAME), constants
    assert run is not None
    dimensions = _dimensions(
        c.key_heads,
        c.taps.shape,
        *(projected.shape, projected.stride()),
        *(conv_pool.shape, conv_pool.stride()),
        *(state_pool.shape, state_pool.stride()),
    )
    rows, inner = len(projected), dimensions[0] * dimensions[1]
    for given in (slots, positions):
        if given.dtype != torch.int64 or given.shape != (rows,) or not given.is_contiguous():
            raise ValueError(f"slots and positions are not {rows} of int64 side by side")
    y = torch.empty(rows, inner, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(c.taps.data_ptr(), None if c.conv_bias is None else c.conv_bias.data_ptr()),
        *(c.dt_bias.data_ptr(), c.A.data_ptr(), c.norm.data_ptr(), c.eps),
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(slots.data_ptr(), positions.data_ptr(), y.data_ptr(), inner, rows),
        *dimensions,
    )
    return y


@lru_cache(maxsize=1024)
def _dimensions(
    key_heads: int,
    taps: Shape,
    projected: Shape,
    rows: Shape,
    conv_pool: Shape,
    conv: Shape,
    state_pool: Shape,
    state: Shape,
) -> tuple[int, int, int, int, int]:
    """heads, width, key_heads, size, kernel; rows, conv and state: strides. Asked again and again for the same."""
    (kernel, channels), (heads, width, size) = taps, state_pool[1:]
    inner = heads * width
    if channels != inner + 2 * key_heads * size or heads % key_heads:
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} and {key_heads} of keys of {size}")
    given = {
        "projected": (projected[1:], rows[1:], (inner + channels + 2 * heads,)),
        "the convolution's pool": (conv_pool[1:], conv[1:], (kernel - 1, channels)),
        "the pool of states": (state_pool[1:], state[1:], (heads, width, size)),
    }
    for name, (shape, strides, wanted) in given.items():
        if shape != wanted or not _side_by_side(shape, strides):
            raise ValueError(f"a row of {name} is {shape} with strides {strides}, not {wanted} side by side")
    return heads, width, key_heads, size, kernel


def _side_by_side(shape: Shape, strides: Shape) -> bool:
    return all(shape[i] == 1 or strides[i] == prod(shape[i + 1 :]) for i in range(len(shape)))


def check() -> None:
    """Raises AssertionError where it differs from the reference."""
    heads, width, key_heads, size, slots = 4, 20, 2, 37, torch.tensor([2, 0, 3])
    inner, channels = heads * width, heads * width + 2 * key_heads * size
    g = torch.Generator().manual_seed(0)
    constants = DeltaConstants(
        taps=torch.randn(4, channels, generator=g),
        conv_bias=torch.randn(channels, generator=g),
        dt_bias=torch.randn(heads, generator=g),
        A=-torch.rand(heads, generator=g),
        norm=torch.randn(width, generator=g),
        key_heads=key_heads,
        eps=1e-5,
    )
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    for dtype, state_dtype in product(TYPES, TYPES):
        projected = torch.randn(len(slots), inner + channels + 2 * heads, generator=g).to(dtype)
        found, expected = ([pools[0].clone(), pools[1].to(state_dtype, copy=True)] for _ in range(2))
        y = delta_decode(projected, constants, found[0], found[1], slots, slots)
        exact = reference.delta_decode(projected, constants, expected[0], expected[1], slots, slots)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        assert_agrees(y, exact, rtol=tolerance, atol=tolerance)
        assert_agrees(found[0], expected[0], rtol=1e-4, atol=1e-4)
        assert_agrees(found[1], expected[1], rtol=1e-4 if state_dtype == torch.float32 else 0.01, atol=1e-4)


cpp.declare(NAME, ARGUMENTS, check)
