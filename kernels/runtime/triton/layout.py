"""Strides of tensors that are passed to kernels."""

from torch import Tensor


def row_stride(rows: Tensor) -> int:
    """Return the stride of the first dimension in elements. Raise ValueError unless each row or slot is contiguous."""
    expected = 1
    for size, stride in zip(reversed(rows.shape[1:]), reversed(rows.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"rows of {tuple(rows.shape[1:])} with strides {rows.stride()} are not contiguous")
        expected *= size
    return rows.stride(0)
