"""How a kernel finds the rows of a tensor."""

from torch import Tensor


def row_stride(rows: Tensor) -> int:
    """Elements from one row, or slot, to the next. ValueError where those within a row do not lie side by side."""
    expected = 1
    for size, stride in zip(reversed(rows.shape[1:]), reversed(rows.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"rows of {tuple(rows.shape[1:])} with strides {rows.stride()} do not lie side by side")
        expected *= size
    return rows.stride(0)
