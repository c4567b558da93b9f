"""The gated delta rule in chunks and for single tokens, against the recurrence token by token in float64."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.delta_net.rule import delta_scan, delta_update, unit_length
from baton.kernels.prefill.chunk_table import chunk_table, cut
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack, random_packed

F32, BF16 = torch.float32, torch.bfloat16
many = settings(max_examples=40, deadline=None)


@dataclass
class Rule:
    """Inputs of the gated delta rule for some tokens, and the state pool that the rule updates."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    pool: Tensor

    def prefill(self, packed: Packed, chunk_size: int = 64) -> Tensor:
        lists = cut(packed.offsets, packed.starts, packed.slots, packed.checkpoints, chunk_size)
        table = chunk_table(lists, torch.device("cpu"))
        return delta_scan(self.q, self.k, self.v, self.g, self.beta, self.pool, table)

    def update(self, slots: list[int], positions: list[int]) -> Tensor:
        at = torch.tensor(slots), torch.tensor(positions)
        return delta_update(self.q, self.k, self.v, self.g, self.beta, self.pool, *at)

    def rows(self, rows: slice) -> "Rule":
        """Return the inputs of these tokens, with the same pool."""
        return Rule(self.q[rows], self.k[rows], self.v[rows], self.g[rows], self.beta[rows], self.pool)

    def over(self, pool: Tensor) -> "Rule":
        return replace(self, pool=pool)


def drawn(
    tokens: int,
    slots: int,
    seed: int = 0,
    keys: int = 2,
    ratio: int = 3,
    size: int = 8,
    width: int = 5,
    fall: float = 1,
) -> Rule:
    """Draw inputs. Every second head decays, with g between -fall / 2 and 0; the remaining heads have g = 0."""
    gen = torch.Generator().manual_seed(seed)
    heads = keys * ratio
    decays = torch.arange(heads) % 2
    return Rule(
        unit_length(torch.randn(tokens, keys, size, generator=gen)) * size**-0.5,
        unit_length(torch.randn(tokens, keys, size, generator=gen)),
        torch.randn(tokens, heads, width, generator=gen),
        -torch.rand(tokens, heads, generator=gen) * fall / 2 * decays,
        torch.rand(tokens, heads, generator=gen),
        torch.randn(slots, heads, width, size, generator=gen),
    )


def recurrence(rule: Rule, packed: Packed) -> tuple[Tensor, Tensor]:
    """Return o [tokens, value heads, value size] and the updated pool, by definition.

    The state S becomes S·(e^g·(I − beta·k·kᵀ)) + beta·v·kᵀ.
    """
    pool, o = rule.pool.double(), torch.empty(rule.v.shape, dtype=torch.float64)
    ratio, identity = rule.v.shape[1] // rule.k.shape[1], torch.eye(rule.k.shape[2], dtype=torch.float64)
    for segment, slot in enumerate(packed.slots):
        state = pool[slot].clone()
        for token in range(packed.offsets[segment], packed.offsets[segment + 1]):
            for head in range(rule.v.shape[1]):
                q, k = rule.q[token, head // ratio].double(), rule.k[token, head // ratio].double()
                beta, decay = rule.beta[token, head].double(), rule.g[token, head].double().exp()
                transition = decay * (identity - beta * torch.outer(k, k))
                state[head] = state[head] @ transition + beta * torch.outer(rule.v[token, head].double(), k)
                o[token, head] = state[head] @ q
            position = packed.starts[segment] + token - packed.offsets[segment] + 1
            for owner, at, target in packed.checkpoints:
                if (owner, at) == (segment, position):
                    pool[target] = state
        pool[slot] = state
    return o, pool


def assert_close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found, exact.float(), atol=2e-5, rtol=1e-5)


def test_unit_length() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(unit_length(x), torch.tensor([[0.6, 0.8], [0.0, 0.0]]), atol=1e-6, rtol=0)
    assert unit_length(torch.tensor([[1e-3, 0.0]]))[0, 0] == pytest.approx(0.5**0.5), "the 1e-6 counts"


@many
@given(
    packed=packs(),
    keys=st.integers(1, 3),
    ratio=st.integers(1, 3),
    size=st.integers(1, 20),
    width=st.integers(1, 20),
    fall=st.sampled_from([0.0, 1.0, 60.0]),
    seed=st.integers(0, 9),
)
def test_chunks_equal_the_recurrence_at_every_checkpoint(
    packed: Packed, keys: int, ratio: int, size: int, width: int, fall: float, seed: int
) -> None:
    """Chunks equal the recurrence for new and resumed segments, shared key heads, odd sizes, weak and strong decays."""
    rule = drawn(packed.tokens, packed.pool_size, seed, keys, ratio, size, width, fall)
    o, pool = recurrence(rule, packed)
    assert_close(rule.prefill(packed), o)
    assert_close(rule.pool, pool)


@pytest.mark.parametrize("chunk_size", [16, 50, 256])
def test_any_chunk_size(chunk_size: int) -> None:
    packed = random_packed(chunk_size)
    rule = drawn(packed.tokens, packed.pool_size)
    o, pool = recurrence(rule, packed)
    assert_close(rule.prefill(packed, chunk_size), o)
    assert_close(rule.pool, pool)


def test_the_largest_decay_ends_in_zero_and_not_in_nan() -> None:
    packed = pack([130], [0], [(0, 64)])
    rule = drawn(130, packed.pool_size)
    rule.g.fill_(-1e4)
    o, pool = recurrence(rule, packed)
    assert_close(rule.prefill(packed), o)
    assert_close(rule.pool, pool)


def test_overwriting_keeps_only_the_last_value() -> None:
    """With beta 1, no decay and a single key, each value replaces the previous one."""
    packed = pack([70], [0], [])
    rule = drawn(70, packed.pool_size, keys=1, ratio=1)
    rule.k[:], rule.q[:], rule.g[:], rule.beta[:] = rule.k[0].clone(), rule.k[0].clone(), 0, 1
    rule.k *= rule.k.square().sum(-1, keepdim=True).rsqrt()
    rule.q *= rule.q.square().sum(-1, keepdim=True).rsqrt()
    assert_close(rule.prefill(packed), rule.v)


@many
@given(packed=packs(), seed=st.integers(0, 9), states=st.sampled_from([F32, BF16]))
def test_a_segment_is_unaffected_by_other_segments_and_by_nan_in_other_slots(
    packed: Packed, seed: int, states: torch.dtype
) -> None:
    together = drawn(packed.tokens, packed.pool_size, seed)
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


@many
@given(chunks=st.lists(st.integers(1, 3), min_size=1, max_size=3), rest=st.integers(1, 63), seed=st.integers(0, 9))
def test_a_prompt_cut_at_multiples_of_the_chunk_is_the_same_bits(chunks: list[int], rest: int, seed: int) -> None:
    cuts = [0]
    for count in chunks:
        cuts.append(cuts[-1] + 64 * count)
    cuts.append(cuts[-1] + rest)
    once = drawn(cuts[-1], 2, seed)
    in_pieces = once.over(once.pool.clone())
    expected = once.prefill(Packed([0, cuts[-1]], [0], [1], [], 2))
    for begin, end in pairwise(cuts):
        o = in_pieces.rows(slice(begin, end)).prefill(Packed([0, end - begin], [begin], [1], [], 2))
        assert torch.equal(o, expected[begin:end])
    assert torch.equal(in_pieces.pool, once.pool)


@many
@given(packed=packs())
def test_states_in_bfloat16_are_rounded_where_they_are_stored_and_not_between_chunks(packed: Packed) -> None:
    exact = drawn(packed.tokens, packed.pool_size)
    rounded = exact.over(exact.pool.to(BF16))
    exact = exact.over(rounded.pool.float())
    assert torch.equal(rounded.prefill(packed), exact.prefill(packed))
    assert torch.equal(rounded.pool, exact.pool.to(BF16))


@many
@given(
    slots=st.lists(st.integers(0, 5), min_size=1, unique=True),
    keys=st.integers(1, 3),
    ratio=st.integers(1, 3),
    size=st.integers(1, 20),
    width=st.integers(1, 20),
    fall=st.sampled_from([0.0, 1.0, 300.0]),
)
def test_an_update_equals_a_prefill_of_one_token(
    slots: list[int], keys: int, ratio: int, size: int, width: int, fall: float
) -> None:
    rows = len(slots)
    decoded = drawn(rows, 6, rows, keys, ratio, size, width, fall)
    filled = decoded.over(decoded.pool.clone())
    expected = filled.prefill(Packed([*range(rows + 1)], [7] * rows, slots, [], 6))
    torch.testing.assert_close(decoded.update(slots, [7] * rows), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(decoded.pool, filled.pool, atol=1e-5, rtol=1e-5)


def test_an_update_rounds_stochastically_and_only_after_computing_the_output() -> None:
    exact = drawn(3, 6)
    rounded = exact.over(exact.pool.to(BF16))
    exact = exact.over(rounded.pool.float())
    slots, positions = [4, 0, 2], [0, 9, 1000]
    others = rounded.pool[[1, 3, 5]].clone()
    assert torch.equal(rounded.update(slots, positions), exact.update(slots, positions))
    assert torch.equal(rounded.pool[slots], round_stochastically(exact.pool[slots], torch.tensor(positions)))
    assert torch.equal(rounded.pool[[1, 3, 5]], others)
