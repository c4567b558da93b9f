"""The operations of reference.py in C++ (cpu.cpp): one call each, and one pass over the states."""

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.decode import reference
from baton.kernels.drafts import Drafts
from baton.kernels.drafts.native import FEED, check_rows, feed_arguments
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME, KDA = "baton_delta_decode", "baton_kda_decode"
POOLS = (POINTER, INT64, INT, POINTER, INT64)
ROWS = (*(POINTER,) * 3, *FEED)
ARGUMENTS = [*(INT, POINTER, INT64), *(POINTER,) * 5, FLOAT, FLOAT, *POOLS, *ROWS, *(INT64,) * 6]
KDA_ARGUMENTS = [INT, *(POINTER, INT64) * 3, *(POINTER,) * 4, FLOAT, FLOAT, *POOLS, *ROWS, *(INT64,) * 5]
Shape = tuple[int, ...]
Layouts = tuple[Shape, ...]
"""The shape and the strides of each tensor, alternating: shape, strides, shape, strides, …"""


def takes(projected: Tensor, constants: DeltaConstants, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Return whether the C function is installed and takes these arguments of delta_decode."""
    return cpp.function(NAME) is not None and _types_fit(projected, conv_pool, state_pool)


def takes_kda(
    projected: Tensor, forget: Tensor, gate: Tensor, constants: KdaConstants, conv_pool: Tensor, state_pool: Tensor
) -> bool:
    """Return whether the C function is installed and takes these arguments of kda_decode."""
    same = projected.dtype == forget.dtype == gate.dtype
    return cpp.function(KDA) is not None and same and _types_fit(projected, conv_pool, state_pool)


def _types_fit(projected: Tensor, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Return whether tensors are on the CPU and of dtypes that the C functions take."""
    return (
        projected.is_cpu and projected.dtype in TYPES and conv_pool.dtype == torch.float32 and state_pool.dtype in TYPES
    )


def delta_decode(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts | None = None,
    ring: Tensor | None = None,
) -> Tensor:
    """Compute reference.delta_decode. Raise ValueError for layouts that the C function does not take.

    The pools and `projected` may be strided in their first dimension.
    """
    run, c = cpp.function(NAME), constants
    assert run is not None
    dimensions = _delta_dimensions(
        c.key_heads,
        c.taps.shape,
        (
            *(projected.shape, projected.stride()),
            *(conv_pool.shape, conv_pool.stride()),
            *(state_pool.shape, state_pool.stride()),
        ),
    )
    rows, inner = len(slots), dimensions[0] * dimensions[1]
    check_rows(slots, positions)
    feed = feed_arguments(projected, rows, projected.shape[1] - inner, drafts, ring)
    y = torch.empty(len(projected), inner, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(c.taps.data_ptr(), None if c.conv_bias is None else c.conv_bias.data_ptr()),
        *(c.dt_bias.data_ptr(), c.A.data_ptr(), c.norm.data_ptr(), c.eps, c.beta_scale),
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(slots.data_ptr(), positions.data_ptr(), y.data_ptr()),
        *(*feed, rows),
        *dimensions,
    )
    return y


def kda_decode(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts | None = None,
    ring: Tensor | None = None,
) -> Tensor:
    """Compute reference.kda_decode. Raise ValueError for layouts that the C function does not take.

    The pools and the projections may be strided in their first dimension.
    """
    run, c = cpp.function(KDA), constants
    assert run is not None
    dimensions = _kda_dimensions(
        c.taps.shape,
        (
            *(projected.shape, projected.stride()),
            *(forget.shape, forget.stride()),
            *(gate.shape, gate.stride()),
            *(conv_pool.shape, conv_pool.stride()),
            *(state_pool.shape, state_pool.stride()),
        ),
    )
    rows, inner = len(slots), dimensions[0] * dimensions[1]
    check_rows(slots, positions)
    feed = feed_arguments(projected, rows, projected.shape[1] + forget.shape[1], drafts, ring)
    y = torch.empty(len(projected), inner, dtype=projected.dtype)
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0)),
        *(forget.data_ptr(), forget.stride(0), gate.data_ptr(), gate.stride(0)),
        *(c.taps.data_ptr(), c.dt_bias.data_ptr(), c.A.data_ptr(), c.norm.data_ptr()),
        *(c.eps, c.lower_bound or 0.0),
        *(conv_pool.data_ptr(), conv_pool.stride(0)),
        *(TYPES[state_pool.dtype], state_pool.data_ptr(), state_pool.stride(0)),
        *(slots.data_ptr(), positions.data_ptr(), y.data_ptr()),
        *(*feed, rows),
        *dimensions,
    )
    return y


@lru_cache(maxsize=1024)
def _delta_dimensions(key_heads: int, taps: Shape, layouts: Layouts) -> Shape:
    """Return heads, width, key_heads, size and kernel width. Raise ValueError for tensors that do not fit together.

    Cached, because every decoding step has the same layouts.

    layouts: the shapes and strides of `projected`, the convolution pool and the state pool.
    """
    (kernel, channels), (_, heads, width, size) = taps, layouts[-2]
    inner = heads * width
    if channels != inner + 2 * key_heads * size or heads % key_heads:
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} and {key_heads} of keys of {size}")
    _check_layouts(layouts, kernel, channels, (heads, width, size), {"projected": inner + channels + 2 * heads})
    return heads, width, key_heads, size, kernel


@lru_cache(maxsize=1024)
def _kda_dimensions(taps: Shape, layouts: Layouts) -> Shape:
    """Return heads, width, size and kernel width. Raise ValueError for tensors that do not fit together.

    layouts: the shapes and strides of `projected`, `forget`, `gate`, the convolution pool and the state pool.
    """
    (kernel, channels), (_, heads, width, size) = taps, layouts[-2]
    if channels != heads * (2 * size + width):
        raise ValueError(f"{channels} channels do not fit {heads} heads of {width} with keys of {size}")
    columns = {"projected": channels + heads, "forget": heads * size, "gate": heads * width}
    _check_layouts(layouts, kernel, channels, (heads, width, size), columns)
    return heads, width, size, kernel


def _check_layouts(layouts: Layouts, kernel: int, channels: int, state: Shape, columns: dict[str, int]) -> None:
    """Raise ValueError unless each tensor's rows are contiguous and have the expected shape.

    state: the shape of one row's state.
    columns: the name and width of each projection, in the order of `layouts`.
    """
    shapes: dict[str, Shape] = {name: (count,) for name, count in columns.items()}
    shapes |= {"the convolution's pool": (kernel - 1, channels), "the pool of states": state}
    for (name, expected), shape, strides in zip(shapes.items(), layouts[::2], layouts[1::2], strict=True):
        row_shape, row_strides = tuple(shape[1:]), strides[1:]
        if row_shape != expected or not _is_contiguous(row_shape, row_strides):
            raise ValueError(f"a row of {name} is {row_shape} with strides {row_strides}, not a contiguous {expected}")


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Return whether a tensor of this shape and these strides is contiguous."""
    return all(shape[i] == 1 or strides[i] == prod(shape[i + 1 :]) for i in range(len(shape)))


def check() -> None:
    """Raise AssertionError if delta_decode differs from its reference."""
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
        beta_scale=2.0,
    )
    pools = torch.randn(4, 3, channels, generator=g), torch.randn(4, heads, width, size, generator=g)
    for dtype, state_dtype in product(TYPES, TYPES):
        projected = torch.randn(len(slots), inner + channels + 2 * heads, generator=g).to(dtype)
        found, expected = ((pools[0].clone(), pools[1].to(state_dtype, copy=True)) for _ in range(2))
        y = delta_decode(projected, constants, *found, slots, slots)
        exact = reference.delta_decode(projected, constants, *expected, slots, slots)
        _assert_agree((y, *found), (exact, *expected))


def check_kda() -> None:
    """Raise AssertionError if kda_decode differs from its reference."""
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
    for dtype, state_dtype, lower_bound in product(TYPES, TYPES, (None, -5.0)):
        columns = (channels + heads, heads * size, heads * width)
        projected, forget, gate = (torch.randn(len(slots), count, generator=g).to(dtype) for count in columns)
        inputs = (projected, forget, gate, replace(constants, lower_bound=lower_bound))
        found, expected = ((pools[0].clone(), pools[1].to(state_dtype, copy=True)) for _ in range(2))
        y, exact = kda_decode(*inputs, *found, slots, slots), reference.kda_decode(*inputs, *expected, slots, slots)
        _assert_agree((y, *found), (exact, *expected))


def _assert_agree(found: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    """Raise AssertionError if results, convolution pools or state pools differ by more than rounding."""
    (y, conv, state), (exact, exact_conv, exact_state) = found, expected
    tolerance = 1e-4 if y.dtype == torch.float32 else 0.02
    assert_agrees(y, exact, rtol=tolerance, atol=tolerance)
    assert_agrees(conv, exact_conv, rtol=1e-4, atol=1e-4)
    assert_agrees(state, exact_state, rtol=1e-4 if state.dtype == torch.float32 else 0.01, atol=1e-4)


cpp.declare(NAME, ARGUMENTS, check)
cpp.declare(KDA, KDA_ARGUMENTS, check_kda)
