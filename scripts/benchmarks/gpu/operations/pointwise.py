"""Pointwise operations and norms, and operations on whole slots."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from baton.kernels.activations import reference as activations
from baton.kernels.norm.rms import reference as rms_norm
from baton.kernels.state_pool import reference as slots
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of


def norm(draw: Draw, rows: int, hidden: int, is_added: bool = True) -> Operation:
    from baton.kernels.norm.rms import triton

    residual, x, weight = draw.normal(rows, hidden), draw.normal(rows, hidden), draw.normal(hidden)

    def run(residual: Tensor, x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        return triton.add_rms_norm(residual, x if is_added else None, weight, 1e-5, 0.5)

    def exact(residual: Tensor, x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        return rms_norm.add_rms_norm(residual, x if is_added else None, weight, 1e-5, 0.5)

    return Operation(run, exact, (residual, x, weight), (4 if is_added else 2) * bytes_of(x))


def silu_multiply(draw: Draw, rows: int, width: int) -> Operation:
    from baton.kernels.activations import triton

    x = draw.normal(rows, 2 * width)
    return Operation(
        lambda x: (triton.silu_multiply(x),), lambda x: (activations.silu_multiply(x),), (x,), bytes_of(x) * 3 // 2
    )


def squared_relu(draw: Draw, rows: int, width: int) -> Operation:
    from baton.kernels.activations import triton

    x = draw.normal(rows, width)
    return Operation(
        lambda x: (triton.squared_relu(x),), lambda x: (activations.squared_relu(x),), (x,), 2 * bytes_of(x)
    )


def sigmoid_gate(draw: Draw, rows: int, width: int) -> Operation:
    from baton.kernels.activations import triton

    x, gate = draw.normal(rows, width), draw.normal(rows, width)
    return Operation(
        lambda x, gate: (triton.sigmoid_gate(x, gate),),
        lambda x, gate: (activations.sigmoid_gate(x, gate),),
        (x, gate),
        3 * bytes_of(x),
    )


def copy(draw: Draw, count: int, size: int) -> Operation:
    """Build a call that copies `count` slots of `size` bytes."""
    from baton.kernels.state_pool import triton

    pool = draw.integers(256, 2 * count, size).to(torch.uint8)
    sources, targets = draw.order(2 * count).view(2, count)

    def by(form: ModuleType) -> Callable[..., Sequence[Tensor]]:
        def run(pool: Tensor, sources: Tensor, targets: Tensor) -> Sequence[Tensor]:
            form.copy(pool, sources, targets)
            return (pool,)

        return run

    return Operation(by(triton), by(slots), (pool, sources, targets), 2 * count * size)


def move(draw: Draw, count: int, size: int) -> Operation:
    """Build a call that gathers `count` slots of `size` bytes, scatters them to other slots, and clears the sources."""
    from baton.kernels.state_pool import triton

    pool = draw.integers(256, 2 * count, size).to(torch.uint8)
    sources, targets = draw.order(2 * count).view(2, count)

    def by(form: ModuleType) -> Callable[..., Sequence[Tensor]]:
        def run(pool: Tensor, sources: Tensor, targets: Tensor) -> Sequence[Tensor]:
            rows = form.gather(pool, sources)
            form.scatter(pool, targets, rows)
            form.clear(pool, sources)
            return rows, pool

        return run

    return Operation(by(triton), by(slots), (pool, sources, targets), 5 * count * size)
