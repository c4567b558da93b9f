"""Decoding with drafts gives the bits of decoding one token at a time, whatever is accepted."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.delta_net.decode import (
    delta_decode,
    delta_decode_drafts,
    kda_decode,
    kda_decode_drafts,
)
from baton.kernels.drafts import MOST_DRAFTS, Drafts
from baton.kernels.drafts.native import feed_arguments
from baton.kernels.mamba2.decode import mixer_decode, mixer_decode_drafts
from baton.kernels.runtime import cpp
from tests.kernels.delta_net.kinds import GATED, KDA
from tests.kernels.installed import installed, runnable
from tests.kernels.mamba2 import test_decode as mamba2

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = st.sampled_from([F32, BF16])
TOKENS, SLOTS = 14, 7


@dataclass
class Layer:
    """A recurrent layer, with its pools and the rings of its rows."""

    decode: Callable[..., Tensor]
    decode_drafts: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # [sequences · TOKENS, columns] each, and as much again for drafts that are wrong
    constants: object
    pools: tuple[Tensor, Tensor]
    ring: Tensor

    def feed(self, tokens: list[int], *where: object, pools: tuple[Tensor, Tensor] | None = None) -> Tensor:
        chosen = tuple(x[torch.tensor(tokens, dtype=torch.int64)] for x in self.inputs)
        form = self.decode_drafts if len(where) > 2 else self.decode
        return form(*chosen, self.constants, *(pools or self.pools), *where)


def mamba2_layer(seed: int, dtype: torch.dtype, states: torch.dtype, rows: int) -> Layer:
    layout = mamba2.Layout(2, 1, 8 + seed % 9, (19, 64, 128)[seed % 3], seed % 4 + 1, 2 * rows * TOKENS, True, False)
    drawn = mamba2.drawn(layout, dtype, seed, states)
    ring = torch.full((rows + 1, MOST_DRAFTS, drawn.projected.shape[1] - layout.inner), torch.nan, dtype=dtype)
    pools = drawn.conv_pools[:SLOTS, 1], drawn.state_pools[:SLOTS, 1]
    return Layer(mixer_decode, mixer_decode_drafts, (drawn.projected,), drawn.constants, pools, ring)


def gated_layer(seed: int, dtype: torch.dtype, states: torch.dtype, rows: int) -> Layer:
    net = GATED.drawn(GATED.small, 2 * rows * TOKENS, SLOTS, dtype, seed, states)
    inner = net.state_pools.shape[2] * net.state_pools.shape[3]
    ring = torch.full((rows + 1, MOST_DRAFTS, net.projected.shape[1] - inner), torch.nan, dtype=dtype)
    return Layer(delta_decode, delta_decode_drafts, net.inputs, net.constants, net.pools, ring)


def kda_layer(seed: int, dtype: torch.dtype, states: torch.dtype, rows: int) -> Layer:
    net = KDA.drawn(KDA.small, 2 * rows * TOKENS, SLOTS, dtype, seed, states)
    ring = torch.full((rows + 1, MOST_DRAFTS, sum(x.shape[1] for x in net.inputs[:2])), torch.nan, dtype=dtype)
    return Layer(kda_decode, kda_decode_drafts, net.inputs, net.constants, net.pools, ring)


LAYERS = [mamba2_layer, gated_layer, kda_layer]


@pytest.fixture(params=[None, *runnable()], ids=lambda target: target.name if target else "torch", scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with torch, and with this checkout's C++ for each instruction set that this CPU supports."""
    if request.param is None:
        cpp.uninstall()
        yield
    else:
        with installed(request.param):
            yield


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("make", LAYERS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), dtype=DTYPES, states=DTYPES, rows=st.integers(1, 4))
def test_the_bits_are_those_of_one_token_at_a_time(
    make: Callable[..., Layer], seed: int, dtype: torch.dtype, states: torch.dtype, rows: int
) -> None:
    layer, chance = make(seed, dtype, states, rows), random.Random(seed)
    slots, start = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:rows], 1000
    plain = tuple(pool.clone() for pool in layer.pools)
    places = torch.arange(start, start + TOKENS).split(1)
    expected = [
        [layer.feed([row * TOKENS + t], slots[row : row + 1], at, pools=plain) for t, at in enumerate(places)]
        for row in range(rows)
    ]
    done, pending = [0] * rows, [0] * rows  # tokens whose results are known, and those of them that are not stored
    while min(done) < TOKENS or any(pending):
        going = [row for row in chance.sample(range(rows), rows) if done[row] < TOKENS or pending[row]]
        tokens, fed, right = list[int](), list[int](), list[int]()
        for row in going:
            left = TOKENS - done[row]
            count = min(left, 1 + chance.choice([0, 1, 4, MOST_DRAFTS]))
            right.append(min(count, chance.randint(1, count)) if count else 0)
            wrong = rows * TOKENS
            tokens += [row * TOKENS + done[row] + i + (wrong if i >= right[-1] else 0) for i in range(count)]
            fed.append(count)
        drafts = Drafts.of([pending[row] for row in going], fed, going)
        at = torch.tensor([start + done[row] for row in going])
        y = layer.feed(tokens, slots[torch.tensor(going)], at, drafts, layer.ring)
        first = 0
        for row, count, accepted in zip(going, fed, right, strict=True):
            for i in range(accepted):
                assert torch.equal(y[first + i], expected[row][done[row] + i][0])
            first += count
            done[row] += accepted
            pending[row] = max(accepted - 1, 0)
    for found, exact in zip(layer.pools, plain, strict=True):
        assert torch.equal(found, exact)


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("rows", [1, 5])
def test_threads_change_no_bit(make: Callable[..., Layer], rows: int) -> None:
    results = []
    for threads in (1, 3):
        layer = make(5, BF16, F32, rows)
        layer.ring[:] = 1.0
        drafts = Drafts.of([2] * rows, [4] * rows, range(rows))
        with installed(runnable()[0], threads=threads):
            y = layer.feed(list(range(4 * rows)), torch.arange(rows), torch.arange(rows), drafts, layer.ring)
        results.append((y, *layer.pools, layer.ring))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_rings_that_do_not_fit_are_refused() -> None:
    drafts, projected = Drafts.of([0], [2], [0]), torch.zeros(2, 8)
    rings = [None, torch.zeros(1, 4, 7), torch.zeros(1, 4, 8, dtype=BF16), torch.zeros(1, MOST_DRAFTS + 1, 8)]
    for ring in rings:
        with pytest.raises(ValueError, match="ring"):
            feed_arguments(projected, 1, 8, drafts, ring)
    for too_many in (Drafts.of([0], [6], [0]), Drafts.of([5], [1], [0])):
        with pytest.raises(ValueError, match="5 drafts of a row in a ring for 4"):
            feed_arguments(projected, 1, 8, too_many, torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match="2 tokens for 1 rows"):
        feed_arguments(projected, 1, 8, None, None)
