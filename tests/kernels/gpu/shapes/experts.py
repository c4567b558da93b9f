"""Experts of models with floating-point and integer weights, and the shared expert that is added."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import baton.kernels.linear.quantized.triton
import baton.kernels.moe.experts.triton
import baton.kernels.moe.shared_expert.triton
from baton.kernels.linear.quantized.forms import INTEGERS
from baton.kernels.moe.experts import PARTS, Activation, PackedExperts

F32, BF16 = torch.float32, torch.bfloat16
# Number of experts, experts per token, model width, inner width, activation.
SIZES: dict[str, tuple[int, int, int, int, Activation]] = {
    "Granite 4 h-tiny": (64, 6, 1536, 512, "silu_gated"),
    "Granite 4 h-small": (72, 10, 4096, 768, "silu_gated"),
    "Nemotron 3 Nano": (128, 6, 2688, 1856, "relu2"),
    "Qwen3-Next 80B": (512, 10, 2048, 512, "silu_gated"),
    "odd": (5, 3, 71, 135, "silu_gated"),
}


def stack(
    matrices: int, parts: int, outputs: int, inputs: int, bits: int, dtype: torch.dtype
) -> Tensor | PackedExperts:
    if not bits:
        return torch.empty(matrices, parts * outputs, inputs, dtype=dtype, device="meta")
    shape = baton.kernels.linear.quantized.triton.data_shape(outputs, inputs, bits)
    data = torch.empty(matrices * parts, *shape, dtype=torch.uint8, device="meta")
    return PackedExperts(data, parts, outputs, inputs, INTEGERS[bits], dtype, "triton")


def run(sizes: tuple[int, int, int, int, Activation], bits: int, rows: int, dtype: torch.dtype) -> None:
    count, top_k, wide, inner, activation = sizes
    x = torch.empty(rows, wide, dtype=dtype, device="meta")
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device="meta")
    weights = torch.empty(rows, top_k, device="meta")
    first = stack(count, PARTS[activation], inner, wide, bits, dtype)
    second = stack(count, 1, wide, inner, bits, dtype)
    baton.kernels.moe.experts.triton.experts(x, chosen, weights, first, second, activation)


def add(width: int, gated: bool, dtype: torch.dtype) -> None:
    routed, shared = (torch.empty(3, width, dtype=dtype, device="meta") for _ in range(2))
    gate = torch.empty(3, 1, dtype=dtype, device="meta") if gated else None
    baton.kernels.moe.shared_expert.triton.add_shared(routed, shared, gate)


EXPERTS: list[tuple[str, Callable[[], None]]] = [
    (f"{name} int{bits or 16} {rows} rows {dtype}", partial(run, sizes, bits, rows, dtype))
    for name, sizes in SIZES.items()
    for bits in (0, 8, 4)
    for rows, dtype in [(1, BF16), (512, BF16), (8192, BF16), (1, F32), (4096, F32)]
]
CASES: list[tuple[str, Callable[[], None]]] = [
    *EXPERTS,
    *(
        (f"shared expert of {width}, {'gated' if gated else 'plain'}, {dtype}", partial(add, width, gated, dtype))
        for width in (4096, 1000)
        for gated in (False, True)
        for dtype in (BF16, F32)
    ),
]
