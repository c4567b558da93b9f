"""The operation of reference.py in C++ (cpu.cpp), over packed weights. The results are batch-invariant."""

import torch
from torch import Tensor

from baton.kernels.moe.experts import reference
from baton.kernels.moe.experts.packed import PackedExperts, pack_numbers
from baton.kernels.moe.experts.reference import PARTS, Activation
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_experts"
ARGUMENTS = [INT, INT, INT, INT, POINTER, INT64, *(POINTER,) * 7, *(INT64,) * 5]
ROUNDS = 64  # added to a form whose inputs are rounded to 8 bits
ACTIVATIONS: dict[Activation, int] = {"silu_gated": 0, "relu2": 1}


def takes(x: Tensor, input_linear: Tensor | PackedExperts, output_linear: Tensor | PackedExperts) -> bool:
    """Return whether the C function is installed and takes weights of this layout."""
    stacks = (input_linear, output_linear)
    return (
        cpp.function(NAME) is not None
        and x.dtype in TYPES
        and all(isinstance(stack, PackedExperts) and stack.layout == "native" for stack in stacks)
    )


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    input_linear: PackedExperts,
    output_linear: PackedExperts,
    activation: Activation,
) -> Tensor:
    """Compute reference.experts; only for arguments that `takes` accepts.

    Raise ValueError for shapes and dtypes that do not fit.
    """
    run = cpp.function(NAME)
    assert run is not None
    (rows, wide), (count, inner), top_k = x.shape, (input_linear.count, input_linear.outputs), chosen.shape[1]
    _check_weights(x, input_linear, output_linear, PARTS[activation])
    if chosen.dtype != torch.int32 or weights.dtype != torch.float32 or not chosen.shape == weights.shape:
        raise ValueError(f"experts are {tuple(chosen.shape)} of {chosen.dtype}, their weights {tuple(weights.shape)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    if not (chosen.is_contiguous() and weights.is_contiguous()):
        raise ValueError("the chosen experts and their weights must be contiguous")
    y = torch.empty(rows, wide, dtype=x.dtype)
    hidden = torch.empty(rows * top_k, inner, dtype=x.dtype)
    memory = torch.empty(count + 1 + 4 * rows * top_k, dtype=torch.int32)
    run(
        *(TYPES[x.dtype], _code(input_linear), _code(output_linear), ACTIVATIONS[activation]),
        *(x.data_ptr(), x.stride(0)),
        *(chosen.data_ptr(), weights.data_ptr(), input_linear.data.data_ptr(), output_linear.data.data_ptr()),
        *(hidden.data_ptr(), memory.data_ptr(), y.data_ptr()),
        *(rows, top_k, count, wide, inner),
    )
    return y


def _code(stack: PackedExperts) -> int:
    """Return the form of a stack's matrices as the C function takes it."""
    return stack.form.code + ROUNDS * stack.rounds_inputs if stack.form else 0


def _check_weights(x: Tensor, first: PackedExperts, second: PackedExperts, parts: int) -> None:
    """Raise ValueError if the two projections do not fit x or each other."""
    wide, inner = x.shape[1], first.outputs
    fitting = (first.inputs, second.outputs, second.inputs) == (wide, wide, inner) and first.count == second.count
    if not fitting or first.parts != parts or first.dtype != second.dtype:
        raise ValueError(
            f"x is {tuple(x.shape)} for {first.count} experts of {first.parts} x {first.outputs} x {first.inputs} "
            f"and {second.count} of {second.outputs} x {second.inputs}"
        )
    if None in (first.form, second.form) and first.dtype != x.dtype:
        raise ValueError(f"x is of {x.dtype}, and the experts are of {first.dtype}")


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    g = torch.Generator().manual_seed(0)
    chosen = torch.tensor([[2, 0], [1, 2], [-1, 2], [4, 3]], dtype=torch.int32)
    x, weights = torch.randn(4, 71, generator=g), torch.rand(4, 2, generator=g)
    for activation, parts in PARTS.items():
        first = torch.randn(4, parts * 45, 71, generator=g) / 8
        second = torch.randn(4, 71, 45, generator=g) / 8
        for dtype, tolerance in zip(TYPES, (1e-4, 0.05), strict=True):
            plain = first.to(dtype), second.to(dtype)
            packed = pack_numbers(plain[0], parts), pack_numbers(plain[1], 1)
            found = experts(x.to(dtype), chosen, weights, *packed, activation)
            expected = reference.experts(x.to(dtype), chosen, weights, *plain, activation)
            assert_agrees(found, expected, rtol=tolerance, atol=tolerance)


cpp.declare(NAME, ARGUMENTS, check)
