"""Operations on whole slots of a pool: all that a slot holds, in one launch for as many slots as are named."""

from types import ModuleType

from torch import Tensor

from baton.kernels.runtime import triton as gpu
from baton.kernels.state_pool import reference

__all__ = ["clear", "copy", "gather", "scatter"]


def copy(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See reference.copy."""
    _form(pool).copy(pool, sources, targets)


def clear(pool: Tensor, targets: Tensor) -> None:
    """See reference.clear."""
    _form(pool).clear(pool, targets)


def gather(pool: Tensor, sources: Tensor) -> Tensor:
    """See reference.gather."""
    rows: Tensor = _form(pool).gather(pool, sources)
    return rows


def scatter(pool: Tensor, targets: Tensor, rows: Tensor) -> None:
    """See reference.scatter."""
    _form(pool).scatter(pool, targets, rows)


def _form(pool: Tensor) -> ModuleType:
    if not gpu.takes(pool):
        return reference
    from baton.kernels.state_pool import triton

    return triton
