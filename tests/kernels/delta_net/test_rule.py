"""The gated delta rule, by head and by channel (KDA), in chunks and for single tokens, against the recurrence."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.delta_net.rule import delta_scan, unit_length
from baton.kernels.prefill.chunk_table import chunk_table, cut
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.delta_net.rules import (
    BF16,
    F32,
    RULES,
    RuleKind,
    assert_close,
    drawn_by_channel,
    drawn_by_head,
    name_of,
    recurrence,
)
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack, random_packed
from tests.kernels.rounding import FUNCTION, assert_rounded

many = settings(max_examples=40, deadline=None)
both = pytest.mark.parametrize("kind", RULES, ids=name_of)


def test_unit_length() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    exact = x.double() / torch.tensor([[(25 + 1e-6) ** 0.5], [1.0]], dtype=torch.float64)
    assert_rounded(unit_length(x), exact, 2 + 2 * FUNCTION)
    assert unit_length(torch.tensor([[1e-3, 0.0]]))[0, 0] == pytest.approx(0.5**0.5), "the 1e-6 counts"


@both
@many
@given(data=st.data(), packed=packs(), seed=st.integers(0, 9))
def test_chunks_equal_the_recurrence_at_every_checkpoint(
    kind: RuleKind, data: st.DataObject, packed: Packed, seed: int
) -> None:
    """Chunks equal the recurrence for new and resumed segments, odd sizes, and weak, strong and mixed decays."""
    rule = kind.drawn(packed.tokens, packed.pool_size, seed, **data.draw(kind.options))
    o, pool = recurrence(rule, packed)
    assert_close(rule.prefill(packed), o, rule)
    assert_close(rule.pool, pool, rule)


@both
@pytest.mark.parametrize("chunk_size", [16, 50, 256])
def test_any_chunk_size(kind: RuleKind, chunk_size: int) -> None:
    packed = random_packed(chunk_size)
    rule = kind.drawn(packed.tokens, packed.pool_size)
    o, pool = recurrence(rule, packed)
    assert_close(rule.prefill(packed, chunk_size), o, rule, chunk_size)
    assert_close(rule.pool, pool, rule, chunk_size)


@both
@pytest.mark.parametrize("g", [-88.0, -104.0, -1e4, -1e30])
def test_the_largest_decays_end_in_zero_and_not_in_nan(kind: RuleKind, g: float) -> None:
    """Such decays, at all tokens or at every ninth, yield 0. (γ is the sum of g: e^γ is 0, but e^-γ would be ∞.)"""
    packed = pack([130], [0], [(0, 64)])
    for tokens in (slice(None), slice(5, None, 9)):
        rule = kind.drawn(130, packed.pool_size)
        rule.g.zero_()[tokens] = g
        o, pool = recurrence(rule, packed)
        assert_close(rule.prefill(packed), o, rule)
        assert_close(rule.pool, pool, rule)


def test_a_channel_that_is_forgotten_leaves_the_others_exact() -> None:
    """Half of the channels decay by e^-30 at each token; the other half must stay exact."""
    packed = pack([200], [0], [])
    rule = drawn_by_channel(200, packed.pool_size, heads=2, size=8)
    rule.g.zero_()[:, :, ::2] = -30
    o, pool = recurrence(rule, packed)
    assert_close(rule.prefill(packed), o, rule)
    assert_close(rule.pool, pool, rule)
    assert rule.pool[packed.slots[0], :, :, 1::2].abs().mean() > 0.1


@many
@given(packed=packs(), seed=st.integers(0, 9))
def test_one_decay_for_all_channels_is_the_gated_delta_rule(packed: Packed, seed: int) -> None:
    rule = drawn_by_channel(packed.tokens, packed.pool_size, seed)
    rule.g[:] = rule.g[:, :, :1].clone()
    other = rule.over(rule.pool.clone())
    lists = cut(packed.offsets, packed.starts, packed.slots, packed.checkpoints, 64)
    table = chunk_table(lists, torch.device("cpu"))
    o = delta_scan(other.q, other.k, other.v, other.g[:, :, 0], other.beta, other.pool, table)
    assert_close(rule.prefill(packed), o, rule)
    assert_close(rule.pool, other.pool, rule)


def test_overwriting_keeps_only_the_last_value() -> None:
    """With beta 1, no decay and a single key, each value replaces the previous one."""
    packed = pack([70], [0], [])
    rule = drawn_by_head(70, packed.pool_size, keys=1, ratio=1)
    rule.k[:], rule.q[:], rule.g[:], rule.beta[:] = rule.k[0].clone(), rule.k[0].clone(), 0, 1
    rule.k *= rule.k.square().sum(-1, keepdim=True).rsqrt()
    rule.q *= rule.q.square().sum(-1, keepdim=True).rsqrt()
    assert_close(rule.prefill(packed), rule.v.double(), rule)


@both
@many
@given(packed=packs(), seed=st.integers(0, 9), states=st.sampled_from([F32, BF16]))
def test_a_segment_is_unaffected_by_other_segments_and_by_nan_in_other_slots(
    kind: RuleKind, packed: Packed, seed: int, states: torch.dtype
) -> None:
    together = kind.drawn(packed.tokens, packed.pool_size, seed)
    together = together.over(together.pool.to(states))
    before, expected = together.pool.clone(), together.prefill(packed)
    for segment, slot in enumerate(packed.slots):
        rows = slice(*packed.offsets[segment : segment + 2])
        checkpoints = [(0, position, target) for owner, position, target in packed.checkpoints if owner == segment]
        alone = together.rows(rows).over(torch.full_like(before, torch.nan))
        alone.pool[slot] = before[slot]
        part = Packed([0, rows.stop - rows.start], [packed.starts[segment]], [slot], checkpoints, packed.pool_size)
        assert torch.equal(alone.prefill(part), expected[rows])
        own = [slot, *(target for _, _, target in checkpoints)]
        assert torch.equal(alone.pool[own], together.pool[own])


@both
@many
@given(chunks=st.lists(st.integers(1, 3), min_size=1, max_size=3), rest=st.integers(1, 63), seed=st.integers(0, 9))
def test_a_prompt_cut_at_multiples_of_the_chunk_is_the_same_bits(
    kind: RuleKind, chunks: list[int], rest: int, seed: int
) -> None:
    cuts = [0]
    for count in chunks:
        cuts.append(cuts[-1] + 64 * count)
    cuts.append(cuts[-1] + rest)
    once = kind.drawn(cuts[-1], 2, seed)
    in_pieces = once.over(once.pool.clone())
    expected = once.prefill(Packed([0, cuts[-1]], [0], [1], [], 2))
    for begin, end in pairwise(cuts):
        o = in_pieces.rows(slice(begin, end)).prefill(Packed([0, end - begin], [begin], [1], [], 2))
        assert torch.equal(o, expected[begin:end])
    assert torch.equal(in_pieces.pool, once.pool)


@both
@many
@given(packed=packs())
def test_states_in_bfloat16_are_rounded_where_they_are_stored_and_not_between_chunks(
    kind: RuleKind, packed: Packed
) -> None:
    exact = kind.drawn(packed.tokens, packed.pool_size)
    rounded = exact.over(exact.pool.to(BF16))
    exact = exact.over(rounded.pool.float())
    assert torch.equal(rounded.prefill(packed), exact.prefill(packed))
    assert torch.equal(rounded.pool, exact.pool.to(BF16))


@both
@many
@given(data=st.data(), slots=st.lists(st.integers(0, 5), min_size=1, unique=True))
def test_an_update_equals_a_prefill_of_one_token(kind: RuleKind, data: st.DataObject, slots: list[int]) -> None:
    rows = len(slots)
    decoded = kind.drawn(rows, 6, rows, **data.draw(kind.options))
    filled = decoded.over(decoded.pool.clone())
    expected = filled.prefill(Packed([*range(rows + 1)], [7] * rows, slots, [], 6))
    assert_close(decoded.update(slots, [7] * rows), expected, decoded)
    assert_close(decoded.pool, filled.pool, decoded)


@both
def test_an_update_rounds_stochastically_and_only_after_computing_the_output(kind: RuleKind) -> None:
    exact = kind.drawn(3, 6)
    rounded = exact.over(exact.pool.to(BF16))
    exact = exact.over(rounded.pool.float())
    slots, positions = [4, 0, 2], [0, 9, 1000]
    others = rounded.pool[[1, 3, 5]].clone()
    assert torch.equal(rounded.update(slots, positions), exact.update(slots, positions))
    assert torch.equal(rounded.pool[slots], round_stochastically(exact.pool[slots], torch.tensor(positions)))
    assert torch.equal(rounded.pool[[1, 3, 5]], others)
