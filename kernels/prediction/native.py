"""The operations of reference.py in C++ (cpu.cpp)."""

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.kernels.drafts.native import FEED, check_rows, feed_arguments
from baton.kernels.prediction import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import INT64, POINTER

EXCHANGE = "baton_exchange_hidden"
JOIN = "baton_join"


def takes_hidden(hidden: Tensor, states: Tensor) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    return cpp.function(EXCHANGE) is not None and hidden.is_cpu and hidden.is_contiguous() and states.stride(1) == 1


def takes_halves(left: Tensor, right: Tensor) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    return cpp.function(JOIN) is not None and left.is_cpu and left.is_contiguous() and right.is_contiguous()


def exchange_hidden(
    hidden: Tensor, states: Tensor, slots: Tensor, drafts: Drafts | None = None, ring: Tensor | None = None
) -> Tensor:
    """Compute reference.exchange_hidden; only for arguments that `takes_hidden` accepts.

    Raise ValueError for tensors that do not fit together.
    """
    run = cpp.function(EXCHANGE)
    assert run is not None
    rows, size = len(slots), hidden.shape[1]
    if states.dtype != hidden.dtype or states.shape[1] != size:
        raise ValueError(f"states {tuple(states.shape)} of {states.dtype} for {tuple(hidden.shape)} of {hidden.dtype}")
    check_rows(slots, slots)
    begins, offsets, rings, address, stride = feed_arguments(hidden, rows, size, drafts, ring)
    before, width = torch.empty_like(hidden), hidden.itemsize
    run(
        hidden.data_ptr(),
        *(states.data_ptr(), states.stride(0) * width, slots.data_ptr()),
        *(begins, offsets, rings, address, stride * width),
        *(rows, size * width, before.data_ptr()),
    )
    return before


def join(left: Tensor, right: Tensor) -> Tensor:
    """Compute reference.join; only for arguments that `takes_halves` accepts.

    Raise ValueError unless shapes and dtypes are equal.
    """
    run = cpp.function(JOIN)
    assert run is not None
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(f"{tuple(left.shape)} of {left.dtype} beside {tuple(right.shape)} of {right.dtype}")
    rows, size = left.shape
    joined = torch.empty(rows, 2 * size, dtype=left.dtype)
    run(left.data_ptr(), right.data_ptr(), rows, size * left.itemsize, joined.data_ptr())
    return joined


def check_exchange() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    g, slots = torch.Generator().manual_seed(0), torch.tensor([2, 0, 3])
    plain, drafted = None, Drafts.of([2, 0, 1], [1, 3, 0], [1, 2, 0])
    for drafts, tokens in ((plain, 3), (drafted, 4)):
        hidden, states, ring = (torch.randn(*shape, generator=g) for shape in ((tokens, 7), (4, 7), (3, 2, 7)))
        copies = states.clone(), ring.clone()
        before = exchange_hidden(hidden, states, slots, drafts, ring)
        assert torch.equal(before, reference.exchange_hidden(hidden, copies[0], slots, drafts, copies[1]))
        assert torch.equal(states, copies[0]) and torch.equal(ring, copies[1])


def check_join() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    left, right = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
    assert torch.equal(join(left, right), reference.join(left, right))


cpp.declare(EXCHANGE, [*(POINTER, POINTER, INT64, POINTER), *FEED, INT64, INT64, POINTER], check_exchange)
cpp.declare(JOIN, [POINTER, POINTER, INT64, INT64, POINTER], check_join)
