import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.sampling import Sampled, SamplingTensors, cpu, reference, sample

torch.set_num_threads(1)

Sampler = Callable[[Tensor, SamplingTensors], Sampled]
SAMPLERS = [pytest.param(reference.sample, id="reference"), pytest.param(cpu.sample, id="cpu")]


def make_params(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    first_position: int = 0,
) -> SamplingTensors:
    """Return sampling parameters that are the same for every row, at consecutive positions."""
    return SamplingTensors(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full((rows,), seed),
        torch.arange(first_position, first_position + rows),
    )


def pick(params: SamplingTensors, rows: Tensor) -> SamplingTensors:
    return SamplingTensors(
        params.temperature[rows],
        params.top_k[rows],
        params.top_p[rows],
        params.min_p[rows],
        params.seed[rows],
        params.position[rows],
    )


def random_params(rows: int, vocab_size: int, generator: torch.Generator) -> SamplingTensors:
    """Return random sampling parameters for rows of all kinds, including greedy ones."""

    def choose(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    return SamplingTensors(
        choose([0.0, 1e-5, 0.3, 1.0, 1.0, 2.0, 100.0]),
        choose([0, 0, 0, 1, 2, 40, 64, 65, vocab_size - 1, vocab_size, vocab_size + 7]).long(),
        choose([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
        choose([0.0, 0.0, 0.05, 1.0]),
        torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        torch.randint(0, 2**20, (rows,), generator=generator),
    )


def uniform_by_hand(seed: int, position: int) -> float:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    return (mix((mix((seed + gamma) % 2**64) + (position + 1) * gamma) % 2**64) >> 11) / 2**53


def sample_by_hand(logits: list[float], params: SamplingTensors) -> int:
    """Draw for one row (params [1]) by definition, in plain Python except for the float32 exponential."""
    best = max(logits)
    temperature = params.temperature.item()
    if temperature == 0:
        return logits.index(best)
    scaled = (torch.tensor(logits) - torch.tensor(best)) / params.temperature
    weights = [int(w * 2**40) for w in scaled.exp().tolist()]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    top_k, top_p = int(params.top_k), params.top_p.item()
    if top_k > 0:
        ranked = ranked[:top_k]
    mass = sum(weights[i] for i in ranked)
    limit = mass if top_p >= 1 else max(1, int(top_p * float(mass)))
    remaining, before = [], 0
    for i in ranked:
        if before < limit and weights[i] >= int(params.min_p.item() * 2**40):
            remaining.append(i)
        before += weights[i]
    total = sum(weights[i] for i in remaining)
    target = int(uniform_by_hand(int(params.seed), int(params.position)) * float(total))
    reached = 0
    for i in sorted(remaining):
        reached += weights[i]
        if reached > target:
            return i
    raise AssertionError("the target lies below the total")


def test_uniform_is_splitmix64() -> None:
    # The first output of SplitMix64 from state 0, as its authors publish it.
    assert reference._mix(torch.tensor(reference._GAMMA)).item() == 0xE220A8397B1DCDAF - 2**64
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    for position in (0, 1, 1000, 2**40):
        got = reference.uniform(seeds, torch.full_like(seeds, position)).tolist()
        assert got == [uniform_by_hand(seed, position) for seed in seeds.tolist()]


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_uniforms_are_even_and_uncorrelated(over: str) -> None:
    count = 100_000
    counter, fixed = torch.arange(count), torch.full((count,), 3)
    u = reference.uniform(fixed, counter) if over == "positions" else reference.uniform(counter, fixed)
    assert u.min() >= 0
    assert u.max() < 1
    bins = torch.bincount((u * 100).long(), minlength=100)
    assert ((bins - count / 100) ** 2 / (count / 100)).sum() < 148.2  # chi-square with 99 degrees of freedom, p = 0.001
    centred = u - 0.5
    for lag in (1, 2, 64):
        correlation = (centred[lag:] * centred[:-lag]).mean() * 12
        assert abs(correlation) < 4 / math.sqrt(count)


def test_draw_at_the_edges() -> None:
    uniforms = torch.tensor([0.0, 0.39, 0.4, 1 - 2**-53], dtype=torch.float64)
    assert reference.draw(torch.tensor([[0, 2, 0, 3, 0]]).expand(4, -1), uniforms).tolist() == [1, 1, 3, 3]
    # With totals that float64 cannot represent, the last token with a weight is drawn, never the token after it.
    totals = torch.tensor([2**53 + 3, 2**60 - 1, 2**60, 2**60 + 255, 2**61 - 1, 2**62 - 1])
    highest = torch.full((6,), 1 - 2**-53, dtype=torch.float64)
    assert reference.draw(torch.stack((totals, totals * 0), 1), highest).tolist() == [0] * 6


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_small_vocabularies_equal_the_definition_by_hand(sampler: Sampler, data: st.DataObject) -> None:
    # Few distinct values, so that the cutoffs of top-k and top-p fall inside ties.
    value = st.one_of(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.5]), st.floats(-30, 30, width=32))
    logits = data.draw(st.lists(value, min_size=1, max_size=90).filter(lambda row: max(row) > -math.inf))
    params = SamplingTensors(
        torch.tensor([data.draw(st.sampled_from([0.0, 1e-5, 0.5, 1.0, 100.0]))]),
        torch.tensor([data.draw(st.integers(0, 100))]),
        torch.tensor([data.draw(st.one_of(st.just(1.0), st.floats(2**-20, 1, width=32)))]),
        torch.tensor([data.draw(st.sampled_from([0.0, 0.1, 1.0]))]),
        torch.tensor([data.draw(st.integers(-(2**63), 2**63 - 1))]),
        torch.tensor([data.draw(st.integers(0, 2**31))]),
    )
    assert sampler(torch.tensor([logits]), params).tokens.tolist() == [sample_by_hand(logits, params)]


@pytest.mark.parametrize("vocab_size", [50, 65, 1500, 10_000])
@pytest.mark.parametrize("shape", ["peaked", "flat", "ties", "masked"])
def test_candidates_equal_the_full_sort(vocab_size: int, shape: str) -> None:
    rows = 96
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator)
    if shape == "peaked":
        logits *= 6
    elif shape == "flat":
        logits *= 0.01
    elif shape == "ties":
        logits = (logits * 2).round()
    else:
        logits[torch.rand(rows, vocab_size, generator=generator) < 0.9] = -math.inf
        logits[:, 3] = 0.0
    params = random_params(rows, vocab_size, generator)
    expected = reference.sample(logits, params).tokens
    assert cpu.sample(logits, params).tokens.tolist() == expected.tolist()
    assert sample(logits, params).tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_does_not_depend_on_the_batch(sampler: Sampler) -> None:
    rows, vocab_size = 24, 3000
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    params = random_params(rows, vocab_size, generator)
    together = sampler(logits, params).tokens
    for row in range(rows):
        alone = torch.tensor([row])
        assert sampler(logits[alone], pick(params, alone)).tokens == together[row]
    for size in (2, 7, 24, 50):
        some = torch.randint(rows, (size,), generator=generator)
        assert sampler(logits[some], pick(params, some)).tokens.tolist() == together[some].tolist()


@pytest.mark.parametrize("top_k, top_p", [(0, 0.9), (40_000, 1.0), (0, 1.0)])
def test_a_flat_distribution_reaches_beyond_the_candidates(top_k: int, top_p: float) -> None:
    rows, vocab_size = 8, 50_000
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab_size, generator=generator) * 1e-3
    params = make_params(rows, top_k=top_k, top_p=top_p)
    tokens = cpu.sample(logits, params).tokens
    assert tokens.tolist() == reference.sample(logits, params).tokens.tolist()
    ranks = (logits > logits.gather(1, tokens[:, None])).sum(-1)
    assert (ranks > max(cpu.CANDIDATES)).any()
    assert (ranks < (top_k or top_p * vocab_size * 1.01)).all()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.02), (1.3, 25, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (0.8, 40, 0.9, 0.05)],
)
def test_the_distribution_is_the_softmax_of_the_remaining_tokens(
    sampler: Sampler, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    draws, vocab_size = 20_000, 80
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(9)) * 1.5
    probabilities = (logits.double() / temperature).softmax(-1)
    ranked, order = probabilities.sort(descending=True)
    if top_k:
        ranked[top_k:] = 0
    ranked /= ranked.sum()
    ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
    ranked[ranked < min_p * ranked[0]] = 0
    expected = torch.zeros_like(ranked).scatter(0, order, ranked / ranked.sum()) * draws

    params = make_params(draws, temperature, top_k, top_p, min_p, seed=42, first_position=100)
    counts = torch.bincount(sampler(logits.expand(draws, -1), params).tokens, minlength=vocab_size)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    degrees = int(possible.sum()) - 1
    statistic = ((counts - expected) ** 2 / expected)[possible].sum().item()
    # Wilson and Hilferty's approximation of the chi-square quantile at p = 0.001.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert degrees > 10


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "limits", [{"top_k": 1}, {"top_p": 1e-20}, {"min_p": 1.0}, {"temperature": 1e-5}, {"temperature": 0.0}]
)
def test_limits_that_leave_the_best_token_alone(sampler: Sampler, limits: dict[str, float]) -> None:
    logits = torch.randn(50, 2000, generator=torch.Generator().manual_seed(3))
    logits[:, 7] = -math.inf
    params = make_params(50, **limits)  # type: ignore[arg-type]
    assert sampler(logits, params).tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_min_p_one_keeps_every_best_token_and_greedy_the_lowest_id(sampler: Sampler) -> None:
    logits = torch.zeros(200, 90)
    logits[:, [11, 30, 80]] = 2.0
    assert set(sampler(logits, make_params(200, min_p=1.0)).tokens.tolist()) == {11, 30, 80}
    assert set(sampler(logits, make_params(200, top_k=2)).tokens.tolist()) == {11, 30}
    assert set(sampler(logits, make_params(200, temperature=0.0)).tokens.tolist()) == {11}
    mixed = replace(make_params(200), temperature=torch.tensor([0.0, 1.0]).repeat(100), top_k=torch.full((200,), 3))
    tokens = sampler(logits, mixed).tokens
    assert set(tokens[::2].tolist()) == {11}
    assert set(tokens[1::2].tolist()) == {11, 30, 80}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 100.0])
def test_banned_tokens_are_never_drawn(sampler: Sampler, temperature: float) -> None:
    logits = torch.full((300, 1200), -math.inf)
    logits[:, 500:503] = torch.tensor([1.0, 1.0, 0.5])
    for limits in ({}, {"top_k": 10}, {"top_p": 0.99999}):
        tokens = sampler(logits, make_params(300, temperature, **limits)).tokens
        assert set(tokens.tolist()) == ({500, 501} if temperature == 1e-5 else {500, 501, 502})


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rows_without_a_finite_best_logit_leave_the_others_alone(sampler: Sampler) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    params = make_params(4, top_p=0.9)
    expected = sampler(logits, params).tokens
    logits[1] = -math.inf
    logits[2, 17] = math.nan
    sampled = sampler(logits, params)
    assert sampled.tokens[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert sampled.tokens[[1, 2]].tolist() == [0, 17]
    assert sampled.finite.tolist() == [True, False, False, True]
    logits[0] = math.inf
    for all_greedy in (True, False):
        assert sampler(logits, replace(params, all_greedy=all_greedy)).finite.tolist() == [False, False, False, True]


def test_flags_take_precedence_over_the_tensors() -> None:
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    params = make_params(64, top_k=2)
    greedy = logits.argmax(-1).tolist()
    for sampler in (reference.sample, cpu.sample):
        assert sampler(logits, params).tokens.tolist() != greedy
        assert sampler(logits, replace(params, all_greedy=True)).tokens.tolist() == greedy
    unlimited = reference.sample(logits, make_params(64)).tokens.tolist()
    assert reference.sample(logits, replace(params, any_truncated=False)).tokens.tolist() == unlimited
