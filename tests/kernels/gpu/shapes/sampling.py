"""Sampling's kernels at the vocabulary sizes of models, on meta tensors, for compilation only."""

from collections.abc import Callable

import torch

from baton.kernels.sampling import SamplingTensors, triton, triton_adjust, triton_log_probabilities


def _params(rows: int, all_greedy: bool, any_truncated: bool) -> SamplingTensors:
    integers, numbers = torch.empty(4, rows, dtype=torch.int64, device="meta"), torch.empty(4, rows, device="meta")
    return SamplingTensors(
        numbers[0], integers[0], numbers[1], numbers[2], integers[1], integers[2], all_greedy, any_truncated
    )


def _sample(vocab_size: int, all_greedy: bool = False, any_truncated: bool = False) -> Callable[[], None]:
    def run() -> None:
        triton.sample(torch.empty(5, vocab_size, device="meta"), _params(5, all_greedy, any_truncated))

    return run


def _adjust(vocab_size: int) -> Callable[[], None]:
    def run() -> None:
        logits, addends = torch.empty(5, vocab_size, device="meta"), torch.empty(3, device="meta")
        seen = torch.empty(4, vocab_size, dtype=torch.bool, device="meta")
        counts, at = seen.int(), addends.long()
        triton_adjust.apply_penalties(logits, at, seen, counts, at, addends, addends, addends)
        triton_adjust.apply_bias(logits, at, at, addends)
        triton_adjust.apply_masks(logits, at, torch.empty(3, -(-vocab_size // 32), dtype=torch.int32, device="meta"))
        triton_adjust.count(counts, at, at)

    return run


def _log_probabilities(vocab_size: int) -> Callable[[], None]:
    def run() -> None:
        logits, tokens = torch.empty(5, vocab_size, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
        triton_log_probabilities.log_probabilities(logits, tokens, 20)

    return run


CASES: list[tuple[str, Callable[[], None]]] = [
    ("sample greedy 50288", _sample(50_288, all_greedy=True)),
    ("sample 50288", _sample(50_288)),
    ("sample truncated odd 50257", _sample(50_257, any_truncated=True)),
    ("sample truncated 262144", _sample(262_144, any_truncated=True)),
    ("adjust 50288", _adjust(50_288)),
    ("adjust odd 50257", _adjust(50_257)),
    ("log probabilities odd 50257", _log_probabilities(50_257)),
    ("log probabilities 262144", _log_probabilities(262_144)),
]
