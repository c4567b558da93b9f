"""Strides of tensors that are passed to kernels."""

from functools import cache

from torch import Tensor


def row_stride(rows: Tensor) -> int:
    """Return the stride of the first dimension in elements. Raise ValueError unless each row or slot is contiguous."""
    strides = rows.stride()
    if not rows.is_contiguous():
        _check(rows.shape[1:], strides[1:])
    return strides[0]


@cache
def _check(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor is contiguous. An exception is not cached."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"rows of {tuple(shape)} with strides {strides} are not contiguous")
        expected *= size
