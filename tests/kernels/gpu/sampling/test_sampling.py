"""Sampling in Triton: the reference's draws for all splits, batches and ways of finding the top-k and top-p cutoff."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction

from baton.kernels.runtime.triton import KernelConfig, Launch, watched
from baton.kernels.sampling import SamplingTensors, reference, triton
from baton.kernels.sampling.triton_numbers import weights_of
from tests.kernels.gpu.shapes.sampling import CASES
from tests.kernels.sampling.test_sampling import make_params, pick, random_params


def configure(patch: pytest.MonkeyPatch, split: int, listed: int, sort: int = 8, chunk: int = 64) -> None:
    """Replace the configurations. The look-ups are replaced too, because they are cached by vocabulary size."""
    split_config = KernelConfig({"SPLIT": split})
    draw_config = KernelConfig({"LIST": listed, "SORT": sort, "CHUNK": chunk})
    patch.setattr(triton, "_split_config", lambda vocab, device: split_config)
    patch.setattr(triton, "_draw_config", lambda vocab, device: draw_config)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make blocks small, so that small vocabularies have several splits, and some rows overflow a candidate list."""
    configure(monkeypatch, split=32, listed=32)
    yield


def make_logits(rows: int, vocab_size: int, spread: float, grid: float, banned: float, seed: int) -> Tensor:
    """Return logits that are peaked or flat, with ties and with banned tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * spread
    if grid:
        logits = (logits * grid).round() / grid
    return logits.masked_fill_(torch.rand(rows, vocab_size, generator=generator) < banned, -math.inf)


@InterpretedFunction
def weigh(scaled_ptr, weights_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(weights_ptr + places, weights_of(tl.load(scaled_ptr + places)))


def test_weights_are_those_of_the_exponential() -> None:
    ends = torch.tensor([-math.inf, 0.0])
    scaled = torch.cat((-torch.logspace(-9, 1.46, 4000), torch.linspace(-28.5, 0, 4190), ends))
    exact, found = scaled.double().exp() * 2.0**40, torch.empty(8192, dtype=torch.int64)
    weigh[(1,)](scaled, found, BLOCK=8192)
    assert (found - exact).abs().le(exact * 2.0**-22 + 1).all()
    assert found[-2:].tolist() == [0, 2**40]


@given(
    rows=st.integers(1, 3),
    vocab_size=st.integers(1, 150),
    spread=st.sampled_from([1e-3, 1.0, 4.0, 20.0]),
    grid=st.sampled_from([0.0, 0.0, 0.5, 4.0]),
    banned=st.sampled_from([0.0, 0.0, 0.9]),
    is_hinted=st.booleans(),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=10, deadline=None)
def test_draws_are_the_references(
    rows: int, vocab_size: int, spread: float, grid: float, banned: float, is_hinted: bool, seed: int
) -> None:
    logits = make_logits(rows, vocab_size, spread, grid, banned, seed)
    before = logits.clone()
    params = random_params(rows, vocab_size, torch.Generator().manual_seed(seed))
    if is_hinted:
        params = replace(params, all_greedy=False, any_truncated=params.truncated())
    found, expected = triton.sample(logits, params), reference.sample(logits, params)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.finite.tolist() == expected.finite.tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("split, listed, sort, chunk", [(16, 1, 1, 16), (128, 64, 1, 32), (64, 64, 64, 128)])
def test_neither_blocks_nor_other_rows_change_a_draw(
    monkeypatch: pytest.MonkeyPatch, split: int, listed: int, sort: int, chunk: int
) -> None:
    logits = torch.cat([make_logits(2, 70, spread, 2.0 * i, 0.0, i) for i, spread in enumerate((0.01, 1.0, 6.0))])
    params = random_params(6, 70, torch.Generator().manual_seed(4))
    params = replace(params, temperature=params.temperature.clamp(min=0.3))
    expected = reference.sample(logits, params).tokens
    configure(monkeypatch, split, listed, sort, chunk)
    assert triton.sample(logits, params).tokens.tolist() == expected.tolist()
    some = torch.tensor([5, 2])
    assert triton.sample(logits[some], pick(params, some)).tokens.tolist() == expected[some].tolist()


@pytest.mark.parametrize("limits", [{"top_k": 13}, {"top_p": 0.7}, {"top_k": 30, "top_p": 0.5}, {"top_p": 1e-9}])
@pytest.mark.parametrize("listed, sort", [(1, 1), (64, 1), (64, 64)])
def test_a_cut_inside_ties_keeps_the_lowest_ids(
    monkeypatch: pytest.MonkeyPatch, listed: int, sort: int, limits: dict[str, float]
) -> None:
    configure(monkeypatch, 32, listed, sort, chunk=16)
    logits = torch.zeros(2, 40)
    logits[0, 20:] = -0.0
    logits[1, ::2] = -1.0
    params = make_params(2, **limits)  # type: ignore[arg-type]
    assert triton.sample(logits, params).tokens.tolist() == reference.sample(logits, params).tokens.tolist()


@pytest.mark.parametrize("sort, min_p", [(8, 0.0), (128, 0.0), (128, 0.6)])
def test_top_p_lists_only_tokens_near_the_cut(monkeypatch: pytest.MonkeyPatch, sort: int, min_p: float) -> None:
    configure(monkeypatch, split=128, listed=128, sort=sort, chunk=128)
    logits = torch.linspace(0, -4, 250)[torch.randperm(250, generator=torch.Generator().manual_seed(1))].expand(6, -1)
    params = make_params(6, top_p=0.5, min_p=min_p, seed=22)
    first_bins = list[Tensor]()

    def observe(launch: Launch) -> None:
        launch.run()
        if launch.kernel is triton._narrow:
            first_bins.append(launch.arguments[6][:, 0])

    with watched(observe):
        found = triton.sample(logits, params)
    assert found.tokens.tolist() == reference.sample(logits, params).tokens.tolist()
    assert (first_bins[0] > 0).all()


def test_top_p_applies_to_the_mass_before_min_p() -> None:
    logits = torch.full((6, 40), -3.0)
    logits[:, [5, 30]] = torch.tensor([0.0, -0.1])
    params = make_params(6, top_p=0.4, min_p=0.5)
    assert set(triton.sample(logits, params).tokens.tolist()) == {5, 30}


def test_the_distribution_is_the_softmax_of_the_remaining_tokens() -> None:
    draws, vocab_size, temperature = 150, 6, 0.8
    logits = torch.tensor([0.3, -1.0, 1.0, 0.1, -0.2, -4.0])
    expected = (logits.double() / temperature).softmax(-1)
    expected[5] = 0
    expected *= draws / expected.sum()
    params = replace(make_params(draws, temperature, min_p=0.05, seed=11), any_truncated=False)
    counts = torch.bincount(triton.sample(logits.expand(draws, -1), params).tokens, minlength=vocab_size)
    assert counts[5] == 0
    assert ((counts - expected) ** 2 / expected)[:5].sum() < 18.5  # chi-square with 4 degrees of freedom, p = 0.001


def test_rows_without_a_finite_best_logit_are_drawn_greedily_and_reported() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    logits[1], logits[2, [17, 60]], logits[3, 40] = -math.inf, math.nan, math.inf
    for params in (make_params(5, top_p=0.9), make_params(5), replace(make_params(5), all_greedy=True)):
        found, expected = triton.sample(logits, params), reference.sample(logits, params)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.finite.tolist() == expected.finite.tolist() == [True, False, False, False, True]


UNSOUND = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-38, 1e30])


@given(
    vocab_size=st.integers(1, 70),
    logits=st.lists(UNSOUND, min_size=70, max_size=70),
    temperature=st.sampled_from([0.0, 1e-2, 1.0, 100.0]),
    top_k=st.integers(0, 90),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.5, 1.0]),
    greedy=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_tokens_are_of_the_vocabulary_whatever_the_logits_are(
    vocab_size: int, logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, greedy: bool
) -> None:
    params = make_params(2, 0.0 if greedy else temperature, top_k, top_p, min_p)
    row = torch.tensor(logits[:vocab_size])
    ramp = torch.arange(vocab_size).float()
    tokens = triton.sample(torch.stack((row, ramp)), replace(params, all_greedy=greedy)).tokens
    assert ((tokens >= 0) & (tokens < vocab_size)).all()


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.5}])
def test_a_row_without_any_weight_gets_the_last_token(limits: dict[str, float]) -> None:
    """No request has such a min_p. It stands for sums of weights that differ between two kernels."""
    params = make_params(2, min_p=2.0, **limits)  # type: ignore[arg-type]
    assert triton.sample(torch.randn(2, 70), params).tokens.tolist() == [69, 69]


def test_strided_logits_and_parameters() -> None:
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(4, 130, generator=generator)
    params = random_params(8, 96, generator)
    strided = SamplingTensors(*(getattr(params, name)[::2] for name in list(vars(params))[:6]))
    expected = reference.sample(wide[:, 16:112].contiguous(), pick(params, torch.arange(0, 8, 2)))
    assert triton.sample(wide[:, 16:112], strided).tokens.tolist() == expected.tokens.tolist()


def test_greedy_rows_take_two_launches_others_three_and_truncated_ones_five() -> None:
    counts = []
    for _, run in CASES[:3]:
        launches: list[Launch] = []
        with watched(launches.append):
            run()
        counts.append(len(launches))
    assert counts == [2, 3, 5]
