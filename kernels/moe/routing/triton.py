"""The same as reference.py, by Triton. Inputs are summed in splits of one size, so a row gets the same beside any
others."""

import torch
import triton
from torch import Tensor
from triton import language as tl

from baton.kernels.moe.routing.rule import RoutingRule
from baton.kernels.runtime.triton import KernelConfig, config_of, dot_precision, launch
from baton.kernels.runtime.triton.jit import jit

SPLIT = 256
"""Inputs that a program multiplies at a time."""
STEPS = {torch.float32: 16, torch.bfloat16: 64}
"""Of them at once, by the router's type: products of float32 take no tensor cores, and so more registers."""
APART = 64
"""Most rows whose splits are summed by programs of their own."""


def route(
    x: Tensor, router: Tensor, bias: Tensor | None, rule: RoutingRule, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.route. Products of float32 are exact, unless kernels.runtime.triton.use_tf32 was asked."""
    x = x.contiguous()
    (rows, inputs), experts, top_k = x.shape, len(router), rule.top_k
    splits = triton.cdiv(inputs, SPLIT)
    apart = splits if rows <= APART else 1
    logits = torch.empty(apart, rows, experts, dtype=torch.float32, device=x.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    shape = f"experts={experts} inputs={inputs} {x.dtype} {router.dtype}"
    config = config_of("moe.routing.logits", shape, x.device, *candidates())
    blocks = config.blocks
    launch(
        _logits,
        (triton.cdiv(experts, blocks["BLOCK_OUT"]), triton.cdiv(rows, blocks["BLOCK_ROWS"]), apart),
        *(x, router, logits, rows),
        config=config,
        EXPERTS=experts,
        INPUTS=inputs,
        SPLITS=splits // apart,
        SPLIT=SPLIT,
        STEP=STEPS[router.dtype],
        PRECISION=dot_precision(),
    )
    each = experts // rule.groups
    launch(
        _choose,
        (rows,),
        *(logits, bias, None if padding is None else padding.view(torch.uint8), chosen, weights, rows, rule.scale),
        config=KernelConfig(warps=4 if experts > 256 else 1),
        SPLITS=apart,
        EACH=each,
        GROUPS=rule.groups,
        KEPT=rule.groups_kept,
        TOP_K=top_k,
        SIGMOID=rule.scores == "sigmoid",
        RENORMALISE=rule.renormalise,
        BLOCK_EACH=triton.next_power_of_2(each),
        BLOCK_GROUPS=triton.next_power_of_2(rule.groups),
        BLOCK_K=triton.next_power_of_2(top_k),
    )
    return chosen, weights


def candidates() -> list[KernelConfig]:
    """The first is the default. See kernels/linear/quantized/triton.py for why there are always 64 outputs."""
    return [KernelConfig({"BLOCK_OUT": 64, "BLOCK_ROWS": rows}, 4, stages) for rows in (16, 32) for stages in (2, 3)]


@jit
def _logits(
    x_ptr,
    router_ptr,
    logits_ptr,
    rows,
    EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """A tile of [splits, rows, EXPERTS], of SPLITS from the program's own on. Programs: experts, rows, splits."""
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    within = tl.arange(0, STEP)
    inside, here = outs < EXPERTS, at < rows
    router_ptr += outs[:, None] * INPUTS + within[None, :]
    x_ptr += at.to(tl.int64)[None, :] * INPUTS + within[:, None]
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for split in range(SPLITS):
        begin = (tl.program_id(2) + split) * SPLIT
        sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
        for start in range(begin, min(begin + SPLIT, INPUTS), STEP):
            there = start + within < INPUTS
            router = tl.load(router_ptr + start, inside[:, None] & there[None, :], other=0.0)
            x = tl.load(x_ptr + start, here[None, :] & there[:, None], other=0.0)
            sums = tl.dot(router, x.to(router.dtype), sums, input_precision=PRECISION)
        total += sums
    places = (tl.program_id(2) * rows + at).to(tl.int64)[None, :] * EXPERTS + outs[:, None]
    tl.store(logits_ptr + places, total, inside[:, None] & here[None, :])


@jit
def _choose(
    logits_ptr,
    bias_ptr,
    padding_ptr,
    chosen_ptr,
    weights_ptr,
    rows,
    scale,
    SPLITS: tl.constexpr,
    EACH: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_EACH: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs: rows. Experts lie in groups of EACH."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_EACH)
    there = (group < GROUPS)[:, None] & (member < EACH)[None, :]
    number = tl.where(there, group[:, None] * EACH + member[None, :], -1)
    logits = tl.zeros((BLOCK_GROUPS, BLOCK_EACH), tl.float32)
    for split in range(SPLITS):
        logits += tl.load(logits_ptr + (split * rows + row) * (GROUPS * EACH) + number, there, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits)) if SIGMOID else logits
    wanted = scores
    if bias_ptr is not None:
        wanted += tl.load(bias_ptr + number, there, other=0.0)
    # No NaN is ever the best.
    wanted = tl.where(there & (wanted == wanted), wanted, float("-inf"))
    if KEPT < GROUPS:
        wanted = tl.where(_kept(wanted, number, group, KEPT, GROUPS, EACH)[:, None], wanted, float("-inf"))
    place = tl.arange(0, BLOCK_K)
    chosen, weights = tl.zeros((BLOCK_K,), tl.int32), tl.zeros((BLOCK_K,), tl.float32)
    for k in range(TOP_K):
        best = _first(wanted, number, there)
        chosen = tl.where(place == k, best, chosen)
        weights = tl.where(place == k, tl.sum(tl.sum(tl.where(number == best, scores, 0.0), 1), 0), weights)
        wanted = tl.where(number == best, float("-inf"), wanted)
    if not SIGMOID:
        most = tl.sum(tl.where(place == 0, weights, 0.0))
        weights = tl.exp(weights - most)
        logits = tl.where(there, tl.exp(logits - most), 0.0)
    weights = tl.where(place < TOP_K, weights, 0.0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights) + 1e-20)
    elif not SIGMOID:
        weights = weights / tl.sum(tl.sum(logits, 1), 0)
    if padding_ptr is not None:
        chosen = tl.where(tl.load(padding_ptr + row) == 0, chosen, -1)
    tl.store(chosen_ptr + row * TOP_K + place, chosen, place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights * scale, place < TOP_K)


@jit
def _kept(wanted, number, group, KEPT: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """Whether a group is one of the KEPT best, each as good as its two best experts."""
    best = tl.max(wanted, 1)
    first = tl.min(tl.where(wanted == best[:, None], number, GROUPS * EACH), 1)
    worth = best
    if EACH > 1:
        worth += tl.max(tl.where(number == first[:, None], float("-inf"), wanted), 1)
    worth = tl.where((group < GROUPS) & (worth == worth), worth, float("-inf"))
    kept = group < 0
    for _ in range(KEPT):
        better = tl.where(kept | (group >= GROUPS), float("-inf"), worth)
        of_best = (better == tl.max(better, 0)) & (group < GROUPS) & (kept == 0)
        kept = kept | (group == tl.min(tl.where(of_best, group, GROUPS), 0))
    return kept


@jit
def _first(wanted, number, there):
    """The lowest number of those that are wanted most."""
    most = tl.max(tl.max(wanted, 1), 0)
    found = tl.where(there & (wanted == most), number, 2147483647)
    return tl.min(tl.min(found, 1), 0)
