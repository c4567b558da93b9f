"""Drawing in C++: the reference's tokens, for all parameters, batches and numbers of threads."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.sampling import SamplingTensors, apply_masks, native, reference, sample, widen
from tests.kernels.installed import installed
from tests.kernels.rounding import assert_within
from tests.kernels.sampling.test_sampling import make_params, pick, random_params, sample_by_hand

many = settings(max_examples=150, deadline=None)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("multiplier", [1.0, 0.3])
@pytest.mark.parametrize("size", [1, 33, 70_000])
def test_outputs_become_logits_as_in_the_reference(size: int, multiplier: float) -> None:
    """All 65,536 numbers of bfloat16 are among the outputs of the greatest size. Denormals may become 0."""
    outputs = torch.arange(2 * size).short().view(torch.bfloat16).view(2, size)
    expected = reference.widen(outputs, multiplier)
    torch.testing.assert_close(widen(outputs, multiplier), expected, rtol=0, atol=2**-126, equal_nan=True)
    assert native.widens(outputs)


@pytest.mark.usefixtures("target")
@many
@given(
    rows=st.integers(1, 9),
    vocab_size=st.one_of(st.integers(1, 300), st.integers(1, 9000)),
    spread=st.sampled_from([1e-3, 0.3, 1.0, 4.0, 20.0]),
    grid=st.sampled_from([0.0, 0.5, 4.0]),
    banned=st.sampled_from([0.0, 0.0, 0.9]),
    seed=st.integers(0, 2**20),
)
def test_draws_are_the_references(
    rows: int, vocab_size: int, spread: float, grid: float, banned: float, seed: int
) -> None:
    """Logits are peaked or flat, have ties, and may have banned tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * spread
    if grid:
        logits = (logits * grid).round() / grid
    logits[torch.rand(rows, vocab_size, generator=generator) < banned] = -math.inf
    params = random_params(rows, vocab_size, generator)
    assert native.sample(logits, params).tokens.tolist() == reference.sample(logits, params).tokens.tolist()


@pytest.mark.usefixtures("target")
@many
@given(data=st.data())
def test_small_vocabularies_equal_the_definition_by_hand(data: st.DataObject) -> None:
    # No denormals, since native code treats them as zero.
    finite = st.floats(-30, 30, width=32, allow_subnormal=False)
    value = st.one_of(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.5]), finite)
    logits = data.draw(st.lists(value, min_size=1, max_size=300).filter(lambda row: max(row) > -math.inf))
    params = SamplingTensors(
        torch.tensor([data.draw(st.sampled_from([0.0, 1e-5, 0.5, 1.0, 100.0]))]),
        torch.tensor([data.draw(st.integers(0, 310))]),
        torch.tensor([data.draw(st.one_of(st.just(1.0), st.floats(2**-20, 1, width=32)))]),
        torch.tensor([data.draw(st.sampled_from([0.0, 0.1, 1.0]))]),
        torch.tensor([data.draw(st.integers(-(2**63), 2**63 - 1))]),
        torch.tensor([data.draw(st.integers(0, 2**31))]),
    )
    assert native.sample(torch.tensor([logits]), params).tokens.tolist() == [sample_by_hand(logits, params)]


@pytest.mark.usefixtures("target")
@many
@given(
    width=st.integers(1, 700),
    values=st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0, math.inf, math.nan]), min_size=1, max_size=700),
)
def test_arg_max_is_the_first_of_equal_numbers_and_nan_is_greatest(width: int, values: list[float]) -> None:
    row = torch.tensor(values + [-2.0] * max(0, width - len(values)))
    best, greatest, finite = native.arg_max(row[None])
    assert bool(finite) == bool(greatest.isfinite())
    assert best.item() == row.argmax().item()
    assert_within(greatest, row.max()[None], 0.0)


@pytest.mark.usefixtures("target")
def test_a_vocabulary_of_a_models_size() -> None:
    rows, vocab_size = 24, 50_288
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab_size, generator=generator) * torch.logspace(-3, 1, rows)[:, None]
    for _ in range(4):
        params = random_params(rows, vocab_size, generator)
        assert sample(logits, params).tokens.tolist() == reference.sample(logits, params).tokens.tolist()


@pytest.mark.usefixtures("target")
def test_strided_logits_and_parameters() -> None:
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(12, 1000, generator=generator)
    params = random_params(24, 700, generator)
    every_second = pick(params, torch.arange(0, 24, 2))
    strided = SamplingTensors(*(getattr(params, name)[::2] for name in list(vars(params))[:6]))
    expected = reference.sample(wide[:, 100:800].contiguous(), every_second).tokens
    assert native.sample(wide[:, 100:800], strided).tokens.tolist() == expected.tolist()
    assert not native.takes(wide.t())


@pytest.mark.usefixtures("target")
def test_rows_without_a_finite_best_logit_are_drawn_greedily() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[1], logits[2, 17], logits[3, 40] = -math.inf, math.nan, math.inf
    for all_greedy in (True, False):
        params = replace(make_params(4, top_p=0.9), all_greedy=all_greedy)
        found = native.sample(logits, params)
        assert found.tokens.tolist() == reference.sample(logits, params).tokens.tolist()
        assert found.finite.tolist() == [True, False, False, False]


def test_threads_and_other_rows_change_nothing() -> None:
    rows, vocab_size = 24, 3000
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    params = random_params(rows, vocab_size, generator)
    expected = reference.sample(logits, params).tokens.tolist()
    for threads in (1, 2, 3):
        with installed(threads=threads):
            assert native.sample(logits, params).tokens.tolist() == expected
            for row in range(rows):
                alone = torch.tensor([row])
                assert native.sample(logits[alone], pick(params, alone)).tokens == expected[row]


@pytest.mark.usefixtures("target")
@many
@given(rows=st.integers(1, 5), more=st.integers(0, 3), vocab_size=st.integers(1, 300), seed=st.integers(0, 2**20))
def test_masks_are_the_references(rows: int, more: int, vocab_size: int, seed: int) -> None:
    """Masks equal the reference's, also if logits are not finite, or are columns of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows + more, vocab_size + 5, generator=generator)
    for odd in (math.nan, math.inf, -math.inf):
        wide[torch.rand(wide.shape, generator=generator) < 0.1] = odd
    at = torch.randperm(rows + more, generator=generator)[:rows]
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), dtype=torch.int32, generator=generator)
    found, expected = wide.clone(), wide.clone()
    assert native.masks(found) and apply_masks(found[:, :vocab_size], at, words).shape[1] == vocab_size
    reference.apply_masks(expected[:, :vocab_size], at, words)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)) and found.isnan().equal(wide.isnan())
