"""Routers of models with experts."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.moe.routing import RoutingRule, triton

F32, BF16 = torch.float32, torch.bfloat16
NEMOTRON = RoutingRule(6, "sigmoid", True, scale=2.5)
ROUTERS: dict[str, tuple[int, int, RoutingRule, torch.dtype]] = {
    "Granite 4 h-tiny": (64, 1536, RoutingRule(6, "softmax", True), BF16),
    "Granite 4 h-small": (72, 4096, RoutingRule(10, "softmax", True), BF16),
    "Nemotron 3 Nano": (128, 2688, NEMOTRON, F32),
    "Qwen3-Next 80B": (512, 2048, RoutingRule(10, "softmax", True), BF16),
    "groups": (512, 4096, RoutingRule(22, "sigmoid", True, groups=8, groups_kept=4, scale=2.5), F32),
    "odd": (35, 71, RoutingRule(3, "softmax", False), F32),
}


def route(router: tuple[int, int, RoutingRule, torch.dtype], rows: int, dtype: torch.dtype) -> None:
    experts, inputs, rule, router_dtype = router
    x = torch.empty(rows, inputs, dtype=dtype, device="meta")
    weight = torch.empty(experts, inputs, dtype=router_dtype if dtype == BF16 else F32, device="meta")
    bias = torch.empty(experts, device="meta") if rule.scores == "sigmoid" else None
    padding = torch.empty(rows, dtype=torch.bool, device="meta") if rows == 1 else None
    triton.route(x, weight, bias, rule, padding)


CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{name}, {rows} rows, {dtype}", partial(route, router, rows, dtype))
    for name, router in ROUTERS.items()
    for rows in (1, 512, 2048)
    for dtype in (BF16, F32)
]
