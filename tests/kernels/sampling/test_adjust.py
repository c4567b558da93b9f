import math
import random

import pytest
import torch

from baton.kernels.sampling import (
    ALL_GREEDY,
    TokenCounts,
    apply_bias,
    apply_masks,
    apply_penalties,
    log_probabilities,
    log_probabilities_of,
    sample,
)
from tests.kernels.rounding import FUNCTION, assert_rounded, largest

torch.set_num_threads(1)


def penalise_by_hand(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    result = list(logits)
    for token in set(prompt) | set(output):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in output:
        result[token] -= frequency
    for token in set(output):
        result[token] -= presence
    return result


@pytest.mark.parametrize("seed", range(5))
def test_penalties_equal_a_direct_loop(seed: int) -> None:
    rng = random.Random(seed)
    rows, vocab_size = 6, 30
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    logits[0, 3] = -math.inf
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randrange(20))] for _ in range(rows)]
    outputs = [[rng.randrange(vocab_size) for _ in range(rng.randrange(40))] for _ in range(rows)]
    penalties = [
        [rng.choice([1.0, 1.3, 0.7]), rng.choice([0.0, 0.5, -0.5]), rng.choice([0.0, 0.2])] for _ in range(rows)
    ]
    counts = TokenCounts(vocab_size, torch.device("cpu"))
    lines = torch.tensor(
        [
            counts.open(torch.tensor(prompt, dtype=torch.long), torch.tensor(output, dtype=torch.long))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
    )
    others = torch.randn(2, vocab_size)
    adjusted, at = torch.cat((others, logits)), torch.arange(2, rows + 2)
    arguments = at, counts.prompt_seen, counts.output_counts, lines, *torch.tensor(penalties).unbind(1)
    assert apply_penalties(adjusted, *arguments) is adjusted
    by_hand = [
        penalise_by_hand(*row)
        for row in zip(logits.tolist(), prompts, outputs, *zip(*penalties, strict=True), strict=True)
    ]
    exact = torch.tensor(by_hand, dtype=torch.float64)
    # Three float32 penalties, a quotient, a product and two differences; a token's frequency counts up to 40 times.
    assert_rounded(adjusted[at], exact, 7, largest(exact) + 40 * 0.2)
    assert torch.equal(adjusted[:2], others)


def test_counts_follow_rows_that_come_and_go() -> None:
    rng = random.Random(0)
    vocab_size = 12
    counts = TokenCounts(vocab_size, torch.device("cpu"))
    running: dict[int, tuple[list[int], list[int]]] = {}
    most = 0
    for _ in range(300):
        if running and rng.random() < 0.3:
            line = rng.choice(list(running))
            del running[line]
            counts.close(line)
        if len(running) < 7 and rng.random() < 0.5:
            prompt, output = [[rng.randrange(vocab_size) for _ in range(rng.randrange(6))] for _ in range(2)]
            line = counts.open(torch.tensor(prompt, dtype=torch.long), torch.tensor(output, dtype=torch.long))
            assert line not in running
            running[line] = (prompt, output)
        most = max(most, len(running))
        lines = [line for line in running if rng.random() < 0.8]
        tokens = [rng.randrange(vocab_size) for _ in lines]
        counts.add(torch.tensor(lines, dtype=torch.long), torch.tensor(tokens, dtype=torch.long))
        for line, token in zip(lines, tokens, strict=True):
            running[line][1].append(token)
        for line, (prompt, output) in running.items():
            assert counts.prompt_seen[line].tolist() == [token in prompt for token in range(vocab_size)]
            assert counts.output_counts[line].tolist() == [output.count(token) for token in range(vocab_size)]
    assert most <= len(counts.output_counts) < 2 * most
    assert len(counts.prompt_seen) == len(counts.output_counts)


def test_bias_adds_and_bans() -> None:
    logits = torch.arange(12.0).view(3, 4)
    rows, tokens = torch.tensor([0, 0, 2, 2]), torch.tensor([1, 3, 0, 0])
    assert apply_bias(logits, rows, tokens, torch.tensor([2.5, -1.0, 100.0, -math.inf])) is logits
    assert logits.tolist() == [[0.0, 3.5, 2.0, 2.0], [4.0, 5.0, 6.0, 7.0], [-math.inf, 9.0, 10.0, 11.0]]


def test_log_probabilities() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 5
    logits[0, 4] = -math.inf
    tokens = torch.tensor([4, 1, 2, 39, 0])
    expected = logits.double().log_softmax(-1)
    chosen, values, ids = log_probabilities(logits, tokens, 6)
    assert chosen.dtype == values.dtype == torch.float32
    best, terms, size = expected.topk(6), 40 + 2 * FUNCTION + 1, largest(logits)
    assert_rounded(chosen, expected[torch.arange(5), tokens], terms, size)
    assert_rounded(values, best.values, terms, size)
    assert ids.tolist() == best.indices.tolist()


def test_log_probabilities_of_ties_and_of_no_alternatives() -> None:
    logits = torch.zeros(2, 9)
    logits[0, [7, 2]] = 1.0
    logits[1, 4] = -0.0
    tokens = torch.tensor([2, 0])
    chosen, _, ids = log_probabilities(logits, tokens, 4)
    assert ids.tolist() == [[2, 7, 0, 1], [0, 1, 2, 3]]
    assert log_probabilities(logits, tokens, 20)[2].shape == (2, 9)
    alone, values, none = log_probabilities(logits, tokens, 0)
    assert alone.tolist() == chosen.tolist()
    assert values.shape == none.shape == (2, 0)
    assert none.dtype == torch.int64


def test_log_probabilities_of_given_ids() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(6))
    ids = torch.tensor([[0, 39], [7, 7], [3, 1]])
    expected = logits.double().log_softmax(-1).gather(1, ids)
    assert_rounded(log_probabilities_of(logits, ids), expected, 40 + 2 * FUNCTION + 1, largest(logits))


def test_a_mask_keeps_the_tokens_that_it_allows() -> None:
    """Token i has bit i % 32 of word i // 32. Bits after the last token are ignored, and other rows do not change."""
    logits = torch.arange(3 * 40, dtype=torch.float32).view(3, 40)
    allowed = {1: [0, 31, 32, 39], 2: []}
    words = torch.zeros(2, 2, dtype=torch.int64)
    for line, tokens in enumerate(allowed.values()):
        for token in tokens:
            words[line, token // 32] |= 1 << token % 32
    words[1, 1] |= 1 << 20
    masked = apply_masks(logits.clone(), torch.tensor(list(allowed)), words.int())
    assert torch.equal(masked[0], logits[0])
    for row, tokens in allowed.items():
        assert masked[row].isfinite().nonzero()[:, 0].tolist() == tokens
        assert torch.equal(masked[row, tokens], logits[row, tokens])


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_so_under_a_mask(odd: float) -> None:
    logits = torch.zeros(2, 40)
    logits[0, 7] = odd
    words = torch.tensor([[1, 0], [1, 0]], dtype=torch.int32)
    assert sample(apply_masks(logits, torch.tensor([0, 1]), words), ALL_GREEDY).finite.tolist() == [False, True]


def test_a_mask_with_too_few_words_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 words of mask for 33 tokens"):
        apply_masks(torch.zeros(1, 33), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))
