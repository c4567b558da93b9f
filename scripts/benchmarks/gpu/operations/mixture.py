"""Mixtures of experts: routing, the experts themselves, and the shared expert."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.linear.quantized import reference as integers
from baton.kernels.linear.quantized.forms import INTEGERS
from baton.kernels.moe.experts import PARTS, Activation, PackedExperts, reference
from baton.kernels.moe.routing import RoutingRule, reference as routing
from baton.kernels.moe.shared_expert import reference as shared_expert
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture."""

    count: int = 128  # experts
    top_k: int = 6  # experts that one token uses
    wide: int = 2688  # number of inputs, and of outputs, of an expert
    inner: int = 1856  # hidden size of an expert
    activation: Activation = "relu2"
    groups: int = 8  # groups of experts; routing in groups chooses some groups first


def route(draw: Draw, mixture: Mixture, rows: int, in_groups: bool) -> Operation:
    """Build a call of the router: softmax, or, if `in_groups`, sigmoid with a bias and groups of experts."""
    from baton.kernels.moe.routing import triton

    m = mixture
    rule = RoutingRule(m.top_k, "softmax", True)
    if in_groups:
        rule = RoutingRule(m.top_k, "sigmoid", True, m.groups, -(-m.groups // 2), 2.5)
    x = draw.normal(rows, m.wide)
    router = draw.normal(m.count, m.wide, dtype=torch.float32) * m.wide**-0.5
    bias = draw.normal(m.count, dtype=torch.float32)

    def run(x: Tensor, router: Tensor, bias: Tensor) -> Sequence[Tensor]:
        return triton.route(x, router, bias if in_groups else None, rule)

    def exact(x: Tensor, router: Tensor, bias: Tensor) -> Sequence[Tensor]:
        return routing.route(x, router, bias if in_groups else None, rule)

    return Operation(run, exact, (x, router, bias), bytes_of(x, router), 2 * rows * m.wide * m.count)


def experts(draw: Draw, mixture: Mixture, rows: int, bits: int | None = None) -> Operation:
    """Build a call of the routed experts, with integer weights if `bits` is given."""
    from baton.kernels.moe.experts import triton

    m, parts = mixture, PARTS[mixture.activation]
    first = draw.normal(m.count, parts * m.inner, m.wide) * m.wide**-0.5
    second = draw.normal(m.count, m.wide, m.inner) * m.inner**-0.5
    x, weights = draw.normal(rows, m.wide), draw.uniform(0, 1, rows, m.top_k)
    chosen = draw.uniform(0, 1, rows, m.count).argsort(dim=1)[:, : m.top_k].int().contiguous()
    packed = (_packed(first, parts, bits), _packed(second, 1, bits)) if bits else None
    stacks = [first, second] if not bits else [_dequantized(first, bits), _dequantized(second, bits)]

    def run(x: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Sequence[Tensor]:
        input_linear, output_linear = packed or (first, second)
        return (triton.experts(x, chosen, weights, input_linear, output_linear, m.activation),)

    def exact(x: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Sequence[Tensor]:
        return (reference.experts(x, chosen, weights, first, second, m.activation),)

    read = bytes_of(*(stack.data for stack in packed)) if packed else bytes_of(first, second)
    moved = read * min(m.count, rows * m.top_k) // m.count + 2 * bytes_of(x)
    flops = 2 * rows * m.top_k * (parts + 1) * m.wide * m.inner
    return Operation(run, exact, (x, chosen, weights, *stacks), moved, flops)


def add_shared(draw: Draw, rows: int, width: int) -> Operation:
    """Build a call that adds the gated output of the shared expert."""
    from baton.kernels.moe.shared_expert import triton

    routed, shared, gate = draw.normal(rows, width), draw.normal(rows, width), draw.normal(rows, 1)

    def run(routed: Tensor, shared: Tensor, gate: Tensor) -> Sequence[Tensor]:
        return (triton.add_shared(routed, shared, gate),)

    def exact(routed: Tensor, shared: Tensor, gate: Tensor) -> Sequence[Tensor]:
        return (shared_expert.add_shared(routed, shared, gate),)

    return Operation(run, exact, (routed, shared, gate), 3 * bytes_of(routed))


def _packed(weight: Tensor, parts: int, bits: int) -> PackedExperts:
    from baton.kernels.linear.quantized import triton

    count, outputs, inputs = len(weight) * parts, weight.shape[1] // parts, weight.shape[2]
    codes, scales = integers.quantize(weight.flatten(0, 1), bits)
    of_matrices = zip(codes.view(count, outputs, -1), scales.view(count, outputs, -1), strict=True)
    data = torch.stack([triton.packed(*matrix, bits) for matrix in of_matrices])
    return PackedExperts(data, parts, outputs, inputs, INTEGERS[bits], weight.dtype, "triton")


def _dequantized(weight: Tensor, bits: int) -> Tensor:
    """Quantize a weight to `bits` bits, and return the values that the integers represent."""
    numbers = integers.dequantize(*integers.quantize(weight.flatten(0, 1), bits))
    return numbers[:, : weight.shape[2]].reshape(weight.shape)
