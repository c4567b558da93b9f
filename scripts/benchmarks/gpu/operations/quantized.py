"""Projections by integer weights."""

from collections.abc import Sequence

from torch import Tensor

from baton.kernels.linear.quantized import reference
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of


def project(draw: Draw, bits: int, rows: int, outputs: int, inputs: int) -> Operation:
    from baton.kernels.linear.quantized import triton

    x, (codes, scales) = draw.normal(rows, inputs), reference.quantize(draw.normal(outputs, inputs), bits)
    data = triton.packed(codes, scales, bits)

    def run(x: Tensor, data: Tensor, codes: Tensor, scales: Tensor) -> Sequence[Tensor]:
        return (triton.linear(x, data, bits, outputs, None),)

    def exact(x: Tensor, data: Tensor, codes: Tensor, scales: Tensor) -> Sequence[Tensor]:
        return (reference.linear(x, codes, scales, None),)

    moved = bytes_of(data, x) + rows * outputs * x.element_size()
    return Operation(run, exact, (x, data, codes, scales), moved, 2 * rows * outputs * inputs)


def look_up(draw: Draw, bits: int, rows: int, outputs: int, inputs: int) -> Operation:
    from baton.kernels.linear.quantized import triton

    codes, scales = reference.quantize(draw.normal(outputs, inputs), bits)
    data, tokens, dtype = triton.packed(codes, scales, bits), draw.integers(outputs, rows), draw.dtype

    def run(tokens: Tensor, data: Tensor, codes: Tensor, scales: Tensor) -> Sequence[Tensor]:
        return (triton.look_up(tokens, data, bits, (outputs, inputs), dtype),)

    def exact(tokens: Tensor, data: Tensor, codes: Tensor, scales: Tensor) -> Sequence[Tensor]:
        return (reference.look_up(tokens, codes, scales, inputs, dtype),)

    return Operation(run, exact, (tokens, data, codes, scales), rows * inputs * (bits // 8 + draw.normal(1).itemsize))
