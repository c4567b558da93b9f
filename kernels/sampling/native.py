"""Draws of reference.py in C++ (cpu.cpp). The exponentials are torch's, which define the weights of a draw."""

import torch
from torch import Tensor

from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT64, POINTER
from baton.kernels.runtime.cpp.checks import assert_agrees
from baton.kernels.sampling import reference
from baton.kernels.sampling.reference import Sampled, SamplingTensors

ARG_MAX, SCALE, DRAW, MASK = "baton_arg_max", "baton_scale_logits", "baton_draw", "baton_mask_logits"
WIDEN = "baton_widen_logits"
BLOCK_ELEMENTS = 2**19  # Maximum size of a temporary: it stays in the CPU's cache, and the allocator reuses its memory.


def takes(logits: Tensor) -> bool:
    """Return whether the C functions that draw tokens are installed and take these logits."""
    installed = all(cpp.function(name) is not None for name in (ARG_MAX, SCALE, DRAW))
    return installed and logits.is_cpu and logits.dtype == torch.float32 and logits.stride(1) == 1


def widens(outputs: Tensor) -> bool:
    """Return whether the C function of `widen` is installed and takes these outputs."""
    installed = cpp.function(WIDEN) is not None
    return installed and outputs.is_cpu and outputs.dtype == torch.bfloat16 and outputs.is_contiguous()


def widen(outputs: Tensor, multiplier: float) -> Tensor:
    """Compute reference.widen without OpenMP.

    torch shares the conversion of more than 32,768 numbers among OpenMP's threads. Waking them takes longer than the
    conversion.
    """
    run = cpp.function(WIDEN)
    assert run is not None
    logits = torch.empty(outputs.shape, dtype=torch.float32)
    run(outputs.data_ptr(), outputs.numel(), multiplier, logits.data_ptr())
    return logits


def masks(logits: Tensor) -> bool:
    """Return whether the C function of apply_masks is installed and takes these logits."""
    return cpp.function(MASK) is not None and logits.is_cpu and logits.stride(1) == 1


def apply_masks(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Compute reference.apply_masks; only for logits that `masks` accepts."""
    run = cpp.function(MASK)
    assert run is not None and logits.dtype == torch.float32 and words.dtype == torch.int32
    rows, words = rows.contiguous(), words.contiguous()
    run(*_row_arguments(logits, rows), words.data_ptr(), words.shape[1])
    return logits


def sample(logits: Tensor, params: SamplingTensors) -> Sampled:
    """Draw one token for each row of logits, float32 [R, V]: the same tokens as reference.sample."""
    tokens, greatest, finite = arg_max(logits)
    if not params.greedy():
        random = ((params.temperature > 0) & finite).nonzero()[:, 0]
        for rows in torch.split(random, max(1, BLOCK_ELEMENTS // logits.shape[1])):
            draw(logits, rows, scaled(logits, rows, greatest, params.temperature).exp_(), params, tokens)
    return Sampled(tokens, finite)


def arg_max(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the id of each row's greatest logit, int64 [R], that logit, float32 [R], and if it is finite, bool [R].

    On a tie the id is the lowest one. A row with NaNs yields the first NaN.
    """
    run = cpp.function(ARG_MAX)
    assert run is not None
    rows = len(logits)
    found = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows, dtype=torch.bool)
    run(logits.data_ptr(), logits.stride(0), *logits.shape, *(column.data_ptr() for column in found))
    return found


def scaled(logits: Tensor, rows: Tensor, greatest: Tensor, temperature: Tensor) -> Tensor:
    """Return (logit - greatest) / temperature of the rows, int64 [n]: float32 [n, V]."""
    run = cpp.function(SCALE)
    assert run is not None
    parameters, result = [greatest.contiguous(), temperature.contiguous()], torch.empty(len(rows), logits.shape[1])
    run(*_row_arguments(logits, rows), *(values.data_ptr() for values in parameters), result.data_ptr())
    return result


def draw(logits: Tensor, rows: Tensor, exps: Tensor, params: SamplingTensors, tokens: Tensor) -> None:
    """Run steps 1 to 5 of reference.py for the rows, int64 [n], and write their tokens to tokens[rows].

    exps: float32 [n, V], contiguous: the exponentials of what `scaled` returns.
    """
    run = cpp.function(DRAW)
    assert run is not None
    columns = [params.top_k, params.top_p, params.min_p, params.seed, params.position]
    columns = [values.contiguous() for values in columns]
    run(*_row_arguments(logits, rows), exps.data_ptr(), *(values.data_ptr() for values in columns), tokens.data_ptr())


def _row_arguments(logits: Tensor, rows: Tensor) -> tuple[int, ...]:
    """Return the arguments that name some rows of logits, which all functions but arg_max begin with."""
    return logits.data_ptr(), logits.stride(0), logits.shape[1], rows.data_ptr(), len(rows)


def check_arg_max() -> None:
    """Raise AssertionError if the C function differs from torch's argmax."""
    logits = _logits()
    logits[0, 200], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    best, _, finite = arg_max(logits)
    assert_agrees(best, logits.argmax(-1), rtol=0, atol=0)
    assert_agrees(finite, logits.amax(-1).isfinite(), rtol=0, atol=0)


def check_scaled() -> None:
    """Raise AssertionError if the C function differs from torch's arithmetic."""
    logits, params = _logits(), _params()
    rows, greatest = torch.arange(1, 24, 2), logits.amax(-1)
    found = scaled(logits, rows, greatest, params.temperature)
    assert_agrees(found, ((logits - greatest[:, None]) / params.temperature[:, None])[rows], rtol=0, atol=0)


def check_draw() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    logits, params = _logits(), _params()
    rows, tokens = torch.arange(24), torch.empty(24, dtype=torch.int64)
    exps = ((logits - logits.amax(-1, keepdim=True)) / params.temperature[:, None]).exp_()
    draw(logits, rows, exps, params, tokens)
    assert_agrees(tokens, reference.sample(logits, params).tokens, rtol=0, atol=0)


def check_widen() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    outputs = _logits().bfloat16()
    for multiplier in (1.0, 1 / 3):
        assert_agrees(widen(outputs, multiplier), reference.widen(outputs, multiplier), rtol=0, atol=0)


def check_masks() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    logits, rows = _logits(), torch.tensor([3, 20, 0])
    logits[3, :40], logits[20, 7], logits[0, 300] = torch.nan, torch.inf, -torch.inf
    words = torch.randint(-(2**31), 2**31, (3, 11), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    expected = reference.apply_masks(logits.clone(), rows, words)
    assert_agrees(apply_masks(logits, rows, words).nan_to_num(1.0, 2.0, 3.0), expected.nan_to_num(1.0, 2.0, 3.0), 0, 0)


def _logits() -> Tensor:
    """Return logits, float32 [24, 307], with ties."""
    return (torch.randn(24, 307, generator=torch.Generator().manual_seed(0)) * 8).round() / 4


def _params() -> SamplingTensors:
    """Return sampling parameters for the rows of _logits."""
    return SamplingTensors(
        temperature=torch.tensor([0.3, 0.5, 1.0, 2.0]).repeat(6),
        top_k=torch.tensor([0, 5, 200]).repeat(8),
        top_p=torch.tensor([1.0, 0.9]).repeat(12),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.1]).repeat(4),
        seed=torch.arange(24),
        position=torch.arange(24) * 7,
    )


cpp.declare(ARG_MAX, [POINTER, INT64, INT64, INT64, POINTER, POINTER, POINTER], check_arg_max)
cpp.declare(SCALE, [POINTER, INT64, INT64, POINTER, INT64, POINTER, POINTER, POINTER], check_scaled)
cpp.declare(WIDEN, [POINTER, INT64, FLOAT, POINTER], check_widen)
cpp.declare(MASK, [POINTER, INT64, INT64, POINTER, INT64, POINTER, INT64], check_masks)
cpp.declare(DRAW, [POINTER, INT64, INT64, POINTER, INT64, *(POINTER,) * 7], check_draw)
