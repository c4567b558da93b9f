"""Operations on logits: draws, penalties, biases, masks and log probabilities."""

from collections.abc import Sequence

from torch import Tensor

from baton.kernels.sampling import SamplingTensors, adjust, reference
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of

TOP = 8


def sample(draw: Draw, rows: int, vocab: int, kind: str) -> Operation:
    """Build a call that draws a token for each row.

    kind: "greedy", "whole" (from all tokens) or "truncated" (by top_k and top_p).
    """
    from baton.kernels.sampling import triton

    logits = draw.uniform(-8.0, 8.0, rows, vocab)
    temperature = draw.uniform(0.5, 1.0, rows) * (kind != "greedy")
    top_k, top_p = draw.integers(100, rows) * (kind == "truncated"), draw.uniform(0.5, 1.0, rows)
    top_p = top_p if kind == "truncated" else top_p * 0 + 1
    drawn = temperature, top_k, top_p, top_p * 0, draw.integers(1000, rows), draw.integers(1000, rows)

    def named(params: Sequence[Tensor]) -> SamplingTensors:
        temperature, top_k, top_p, min_p, seed, position = params
        return SamplingTensors(temperature, top_k, top_p, min_p, seed, position, kind == "greedy", kind == "truncated")

    def run(logits: Tensor, *params: Tensor) -> Sequence[Tensor]:
        sampled = triton.sample(logits, named(params))
        return sampled.tokens, sampled.finite

    def exact(logits: Tensor, *params: Tensor) -> Sequence[Tensor]:
        sampled = reference.sample(logits, named(params))
        return sampled.tokens, sampled.finite

    return Operation(run, exact, (logits, *drawn), bytes_of(logits))


def log_probabilities(draw: Draw, rows: int, vocab: int) -> Operation:
    from baton.kernels.sampling import triton_log_probabilities

    def run(logits: Tensor, tokens: Tensor) -> Sequence[Tensor]:
        return triton_log_probabilities.log_probabilities(logits, tokens, TOP)

    def exact(logits: Tensor, tokens: Tensor) -> Sequence[Tensor]:
        return reference.log_probabilities(logits, tokens, TOP)

    logits = draw.uniform(-8.0, 8.0, rows, vocab)
    return Operation(run, exact, (logits, draw.integers(vocab, rows)), bytes_of(logits))


def adjusted(draw: Draw, rows: int, vocab: int) -> Operation:
    """Build a call that applies penalties, a bias and a mask to each row, and counts a token."""
    from baton.kernels.sampling import triton_adjust

    logits, seen = draw.uniform(-8.0, 8.0, rows, vocab), draw.integers(2, rows + 1, vocab).bool()
    counts, tokens = draw.integers(3, rows + 1, vocab).int(), draw.integers(vocab, rows)
    at, lines = draw.order(rows), draw.order(rows + 1)[:rows]
    repetition, presence, frequency = draw.uniform(0.5, 1.5, 3, rows).unbind()
    words = draw.integers(2**31 - 1, rows, -(-vocab // 32)).int()

    def run(logits: Tensor, counts: Tensor, seen: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        words, tokens, at, lines, *penalties = rest
        triton_adjust.apply_penalties(logits, at, seen, counts, lines, *penalties)
        triton_adjust.apply_bias(logits, at, tokens, penalties[0])
        triton_adjust.apply_masks(logits, at, words)
        triton_adjust.count(counts, lines, tokens)
        return logits, counts

    def exact(logits: Tensor, counts: Tensor, seen: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        words, tokens, at, lines, *penalties = rest
        adjust.apply_penalties(logits, at, seen, counts, lines, *penalties)
        adjust.apply_bias(logits, at, tokens, penalties[0])
        reference.apply_masks(logits, at, words)
        counts.index_put_((lines, tokens), counts.new_ones(()), accumulate=True)
        return logits, counts

    moved = 2 * bytes_of(logits) + bytes_of(seen, counts, words)
    rest = words, tokens, at, lines, repetition, presence, frequency
    return Operation(run, exact, (logits, counts, seen, *rest), moved)
