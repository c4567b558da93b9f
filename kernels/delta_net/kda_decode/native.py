"""The same as reference.py, by cpu.cpp: one call, and one pass over the states."""

from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from baton.kernels.delta_net.kda_constants import KdaConstants
from baton.kernels.delta_net.kda_decode import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_kda_decode"
ARGUMENTS = [
    *(INT, POINTER, INT64, POINTER, INT64, POINTER, INT64),
    *(POINTER,) * 4,
    *(FLOAT, POINTER, INT64, INT, POINTER, INT64),
    *(POINTER,) * 3,
    *(INT64,) * 5,
]
Shape = tuple[int, ...]


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


def kda_decode(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See reference.kda_decode. Slots may lie apart, and rows of what is projected; ValueError for other layouts."""
    run, c, given = cpp.function(NAME), constants, (projected, forget, gate)
    assert run is not None
    dimensions = sizes_of(
        c.taps.shape,
        tuple((tensor.shape[1:], tensor.stride()[1:]) for tensor in (*given, conv_pool, state_pool)),
    )
    rows, inner = len(projected), dimensions[0] * dimensions[1]
    for places in (slots, positions):
        if places.dtype != torch.int64 or places.shape != (rows,) or not places.is_contiguous():
            raise ValueError(f"slots and positions are not {rows} of int64 side by side")
    y = torch.empty(rows, inner, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(forget.data_ptr(), forget.stride(0), gate.data_ptr(), gate.stride(0)),
        *(c.taps.data_ptr(), c.dt_bias.data_ptr(), c.A.data_ptr(), c.norm.data_ptr(), c.eps),
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(slots.data_ptr(), positions.data_ptr(), y.data_ptr()),
        *(rows, *dimensions),
    )
    return y


@lru_cache(maxsize=1024)
def sizes_of(taps: Shape, given: tuple[tuple[Shape, Shape], ...]) -> tuple[int, int, int, int]:
    """heads, width, size, kernel. given: shape and strides, but for the first, of what is projected, forget, gate and
    both pools. ValueError for those that do not fit. Asked again and again for the same."""
    (kernel, channels), (heads, width, size) = taps, given[-1][0]
    if channels != heads * (2 * size + width):
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} with keys of {size}")
    wanted = {
        "projected": (channels + heads,),
        "forget": (heads * size,),
        "gate": (heads * width,),
        "the convolution's pool": (kernel - 1, channels),
        "the pool of states": (heads, width, size),
    }
    for (name, expected), (shape, strides) in zip(wanted.items(), given, strict=True):
        if shape != expected or not _side_by_side(shape, strides):
            raise ValueError(f"a row of {name} is {tuple(shape)} with strides {strides}, not {expected} side by side")
    return heads, width, size, kernel


def _side_by_side(shape: Shape, strides: Shape) -> bool:
    return all(shape[i] == 1 or strides[i] == prod(shape[i + 1 :]) for i in range(len(shape)))


def check() -> None:
    """Raises AssertionError where it differs from the reference."""
    heads, width, size, slots = 2, 20, 37, torch.tensor([2, 0, 3])
    channels, g = heads * (2 * size + width), torch.Generator().manual_seed(0)
    constants = KdaConstants(
        taps=torch.randn(4, channels, generator=g),
        dt_bias=torch.randn(heads * size, generator=g),
        A=-torch.rand(heads, generator=g),
        norm=torch.randn(width, generator=g),
        eps=1e-5,
    )
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    for dtype, state_dtype in product(TYPES, TYPES):
        columns = (channels + heads, heads * size, heads * width)
        projected, forget, gate = (torch.randn(len(slots), count, generator=g).to(dtype) for count in columns)
        given = (projected, forget, gate, constants)
        found, expected = ((pools[0].clone(), pools[1].to(state_dtype, copy=True)) for _ in range(2))
        y = kda_decode(*given, *found, slots, slots)
        exact = reference.kda_decode(*given, *expected, slots, slots)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        assert_agrees(y, exact, rtol=tolerance, atol=tolerance)
        assert_agrees(found[0], expected[0], rtol=1e-4, atol=1e-4)
        assert_agrees(found[1], expected[1], rtol=1e-4 if state_dtype == torch.float32 else 0.01, atol=1e-4)


cpp.declare(NAME, ARGUMENTS, check)
