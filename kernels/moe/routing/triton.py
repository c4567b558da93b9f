"""The operation of reference.py in Triton. Inputs are summed in splits of a fixed size: results are batch-invariant."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.moe.routing.rule import RoutingRule
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, dot_precision, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2

SPLIT = 256
"""Inputs of one split."""
STEPS = {1: 64, 3: 32}
"""Inputs multiplied at a time on tensor cores, by the number of pieces that a router is divided into."""
STEP_OF_FLOATS = 16
"""Inputs multiplied at a time if both factors are float32, which has no tensor cores and so needs more registers."""
MANY, MANY_CONFIG, FEW_CONFIG = 256, KernelConfig(warps=4), KernelConfig(warps=1)
"""With more than MANY experts, a row's experts are chosen with MANY_CONFIG."""
APART = 64
"""Up to this many rows, each split has its own program; with more rows, one program computes all splits of a tile."""


def route(
    x: Tensor, router: Tensor, bias: Tensor | None, rule: RoutingRule, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute reference.route. Float32 products are exact unless kernels.runtime.triton.use_tf32(True) was called."""
    x = x.contiguous()
    (rows, inputs), experts, top_k = x.shape, len(router), rule.top_k
    splits = cdiv(inputs, SPLIT)
    apart = splits if rows <= APART else 1
    logits = torch.empty(apart, rows, experts, dtype=torch.float32, device=x.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    config = _config(experts, inputs, _most_rows(rows, x.dtype), x.dtype, router.dtype, x.device)
    blocks = config.blocks
    pieces = 3 if x.dtype == torch.bfloat16 and router.dtype == torch.float32 else 1
    launch(
        _logits,
        (cdiv(experts, blocks["BLOCK_OUT"]), cdiv(rows, blocks["BLOCK_ROWS"]), apart),
        *(x, router, logits, rows),
        config=config,
        EXPERTS=experts,
        INPUTS=inputs,
        SPLITS=splits // apart,
        SPLIT=SPLIT,
        STEP=STEP_OF_FLOATS if x.dtype == torch.float32 else STEPS[pieces],
        PIECES=pieces,
        PRECISION=dot_precision(),
    )
    each = experts // rule.groups
    launch(
        _choose,
        (rows,),
        *(logits, bias, None if padding is None else padding.view(torch.uint8), chosen, weights, rows, rule.scale),
        config=MANY_CONFIG if experts > MANY else FEW_CONFIG,
        SPLITS=apart,
        EACH=each,
        GROUPS=rule.groups,
        BEST_GROUPS=rule.groups_kept,
        TOP_K=top_k,
        SIGMOID=rule.scores == "sigmoid",
        RENORMALISE=rule.renormalise,
        BLOCK_EACH=next_power_of_2(each),
        BLOCK_GROUPS=next_power_of_2(rule.groups),
        BLOCK_K=next_power_of_2(top_k),
    )
    return chosen, weights


def row_class(dtype: torch.dtype, rows: int) -> tuple[int, bool]:
    """Return the same value for numbers of rows for which `route` launches the same kernels."""
    return _most_rows(rows, dtype), rows <= APART


def _most_rows(rows: int, dtype: torch.dtype) -> int:
    """Return the rows of the largest tile to choose from. Each tile of rows reads the whole router."""
    if rows <= APART:
        return 16
    return 32 if rows <= 1024 or dtype == torch.float32 else 64


@by_shape
def _config(
    experts: int, inputs: int, most_rows: int, dtype: torch.dtype, router_dtype: torch.dtype, device: torch.device
) -> KernelConfig:
    shape = f"experts={experts} inputs={inputs} most_rows={most_rows} {dtype} {router_dtype}"
    return config_of("moe.routing.logits", shape, device, *candidates(most_rows))


def candidates(most_rows: int) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first.

    All have 64 outputs: kernels/linear/quantized/triton.py says why.
    """
    sizes = [size for size in (64, 32, 16) if most_rows // 4 <= size <= most_rows]
    return [KernelConfig({"BLOCK_OUT": 64, "BLOCK_ROWS": size}, 4, stages) for size in sizes for stages in (2, 3)]


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
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Compute a tile of the logits [splits, rows, EXPERTS]: the sum of SPLITS splits, beginning with the program's.

    A float32 router meets bfloat16 inputs in three bfloat16 PIECES, whose sum it is: 3 times 8 bits. So each product
    is exact, as in float32, but is computed by tensor cores.
    Grid: tiles of experts, tiles of rows, splits.
    """
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
            if PIECES == 1:
                sums = tl.dot(router, x.to(router.dtype), sums, input_precision=PRECISION)
            else:
                for _ in tl.static_range(PIECES):
                    piece = router.to(x.dtype)
                    sums = tl.dot(piece, x, sums)
                    router -= piece.to(tl.float32)
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
    BEST_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_EACH: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose a row's experts and compute their weights. Grid: rows.

    Scores are held as [groups, EACH]: consecutive experts form a group.
    """
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_EACH)
    there = (group < GROUPS)[:, None] & (member < EACH)[None, :]
    number = tl.where(there, group[:, None] * EACH + member[None, :], -1)
    logits = tl.zeros((BLOCK_GROUPS, BLOCK_EACH), tl.float32)
    for split in range(SPLITS):
        logits += tl.load(logits_ptr + (split * rows + row) * (GROUPS * EACH) + number, there, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits)) if SIGMOID else logits
    ranking = scores
    if bias_ptr is not None:
        ranking += tl.load(bias_ptr + number, there, other=0.0)
    # A NaN must never be chosen.
    ranking = tl.where(there & (ranking == ranking), ranking, float("-inf"))
    if BEST_GROUPS < GROUPS:
        is_eligible = _best_groups(ranking, number, group, BEST_GROUPS, GROUPS, EACH)
        ranking = tl.where(is_eligible[:, None], ranking, float("-inf"))
    place = tl.arange(0, BLOCK_K)
    chosen, weights = tl.zeros((BLOCK_K,), tl.int32), tl.zeros((BLOCK_K,), tl.float32)
    for k in range(TOP_K):
        best = _first(ranking, number, there)
        chosen = tl.where(place == k, best, chosen)
        weights = tl.where(place == k, tl.sum(tl.sum(tl.where(number == best, scores, 0.0), 1), 0), weights)
        ranking = tl.where(number == best, float("-inf"), ranking)
    if not SIGMOID:  # Softmax, relative to the best logit, so that the exponential cannot overflow.
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
def _best_groups(ranking, number, group, BEST_GROUPS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """Return whether each group is one of the BEST_GROUPS best, ranked by the sum of their two best experts."""
    best = tl.max(ranking, 1)
    first = tl.min(tl.where(ranking == best[:, None], number, GROUPS * EACH), 1)
    worth = best
    if EACH > 1:
        worth += tl.max(tl.where(number == first[:, None], float("-inf"), ranking), 1)
    worth = tl.where((group < GROUPS) & (worth == worth), worth, float("-inf"))
    is_best = group < 0
    for _ in range(BEST_GROUPS):
        better = tl.where(is_best | (group >= GROUPS), float("-inf"), worth)
        is_candidate = (better == tl.max(better, 0)) & (group < GROUPS) & (is_best == 0)
        is_best = is_best | (group == tl.min(tl.where(is_candidate, group, GROUPS), 0))
    return is_best


@jit
def _first(ranking, number, there):
    """Return the number of the expert that ranks highest, the lowest number on a tie."""
    most = tl.max(tl.max(ranking, 1), 0)
    found = tl.where(there & (ranking == most), number, 2147483647)
    return tl.min(tl.min(found, 1), 0)
