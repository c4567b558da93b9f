"""The operation of reference.py in C++ (cpu.cpp), over packed weights. The results are batch-invariant."""

import torch
from torch import Tensor

from baton.kernels.linear.dense import PackedWeight
from baton.kernels.linear.dense.native import BLOCK, packed
from baton.kernels.moe.routing import reference
from baton.kernels.moe.routing.rule import RoutingRule
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_route"
ARGUMENTS = [
    *(INT, POINTER, INT64, INT, POINTER, POINTER),
    *(POINTER, POINTER, POINTER),
    *(INT64, INT64, INT64),
    *(INT64, INT, INT, INT64, INT64, FLOAT),
]


def takes(router: Tensor) -> bool:
    """Return whether the C function is installed and takes weights of this device and dtype."""
    return router.device.type == "cpu" and router.dtype in TYPES and cpp.function(NAME) is not None


def route(
    x: Tensor, router: PackedWeight, bias: Tensor | None, rule: RoutingRule, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute reference.route with a packed router. Raise ValueError for other dtypes and layouts."""
    run = cpp.function(NAME)
    assert run is not None
    rows, inputs = x.shape
    if router.data.dtype not in (x.dtype, torch.float32) or x.dtype not in TYPES or inputs != router.inputs:
        raise ValueError(f"x is {tuple(x.shape)} of {x.dtype} for {router.inputs} inputs in {router.data.dtype}")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (router.outputs,)):
        raise ValueError(f"bias is {tuple(bias.shape)} of {bias.dtype} for {router.outputs} experts")
    if x.stride(1) != 1:
        x = x.contiguous()
    logits = torch.empty(rows, -(-router.outputs // BLOCK) * BLOCK, dtype=torch.float32)
    chosen = torch.empty(rows, rule.top_k, dtype=torch.int32)
    weights = torch.empty(rows, rule.top_k, dtype=torch.float32)
    run(
        *(TYPES[x.dtype], x.data_ptr(), x.stride(0)),
        *(TYPES[router.data.dtype], router.data.data_ptr(), None if bias is None else bias.data_ptr()),
        *(logits.data_ptr(), chosen.data_ptr(), weights.data_ptr()),
        *(rows, inputs, router.outputs),
        *(rule.top_k, int(rule.scores == "sigmoid"), int(rule.renormalise)),
        *(rule.groups, rule.groups_kept, rule.scale),
    )
    return chosen if padding is None else chosen.masked_fill_(padding[:, None], -1), weights


def pack(router: Tensor) -> PackedWeight:
    """Pack a router's weight, [E, D]."""
    return PackedWeight(packed(router), len(router), router.shape[1], with_rows=True)


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    g = torch.Generator().manual_seed(0)
    x, router, bias = torch.randn(5, 37, generator=g), torch.randn(40, 37, generator=g), torch.randn(40, generator=g)
    rules = [
        RoutingRule(3, "softmax", False),
        RoutingRule(3, "softmax", True),
        RoutingRule(3, "sigmoid", True, groups=4, groups_kept=2, scale=2.5),
    ]
    for rule in rules:
        added = bias if rule.scores == "sigmoid" else None
        for dtype in TYPES:
            rounded = router.to(dtype)
            chosen, weights = route(x.to(dtype), pack(rounded), added, rule)
            expected = reference.route(x.to(dtype), rounded, added, rule)
            assert torch.equal(chosen, expected[0]), "it chooses other experts than its reference"
            assert_agrees(weights, expected[1], rtol=1e-4)


cpp.declare(NAME, ARGUMENTS, check)
