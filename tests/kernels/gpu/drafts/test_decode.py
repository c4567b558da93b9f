"""Recurrent layers that decode with drafts in Triton: the bits of one token at a time, and nothing read on the host."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.kernels.drafts import MOST_DRAFTS, Drafts
from baton.kernels.drafts.reference import decode_drafts
from baton.kernels.runtime import triton as gpu
from scripts.benchmarks.gpu.operation import poisoned
from tests.kernels.drafts.layers import EVERY_LAYER, LAYERS, SLOTS, Layer, Make, assert_drafts_change_no_bit
from tests.kernels.gpu.mamba2.test_decode import Operations

F32, BF16 = torch.float32, torch.bfloat16
META = torch.device("meta")
LAUNCHES = 3
every_layer = pytest.mark.parametrize("make", LAYERS)
REPLAYS, FED = [2, 0, 3, 1], [3, 2, 0, 1]


@pytest.mark.parametrize("make", EVERY_LAYER)
@pytest.mark.parametrize(("seed", "states", "rows"), [(3, F32, 1), (0, F32, 1), (1, BF16, 2)])
def test_the_bits_are_those_of_one_token_at_a_time(make: Make, seed: int, states: torch.dtype, rows: int) -> None:
    with gpu.computes_for("cpu"):
        assert_drafts_change_no_bit(make(seed, F32, states, rows), rows, seed)


def drawn(make: Make, states: torch.dtype) -> tuple[Layer, Tensor, Tensor]:
    """Return a layer of four rows with inputs in all rings, and the rows' slots and positions."""
    layer = make(3, F32, states, len(FED))
    layer.ring.normal_(generator=torch.Generator().manual_seed(1))
    return layer, torch.tensor([4, 0, 2, 5]), torch.tensor([1000, 50, 7, 2**33])


@every_layer
@pytest.mark.parametrize("states", [F32, BF16])
def test_results_states_and_rings_are_the_references(make: Make, states: torch.dtype) -> None:
    (found, slots, positions), (exact, _, _) = drawn(make, states), drawn(make, states)
    drafts, tokens = Drafts.of(REPLAYS, FED, [3, 0, 4, 1]), list(range(sum(FED)))
    inner = exact.pools[1][0, :, :, 0].numel()
    last = slice(inner, None) if len(exact.inputs) == 1 else slice(None)
    columns = (last, slice(None), slice(0))[: len(exact.inputs)]
    projections = tuple(x[tokens] for x in exact.inputs)
    with gpu.computes_for("cpu"):
        y = found.feed(tokens, slots, positions, drafts, found.ring)
        where = (exact.pools, slots, positions, drafts, exact.ring)
        expected = decode_drafts(exact.decode, projections, columns, exact.constants, *where)
    assert torch.equal(y, expected)
    assert torch.equal(found.ring, exact.ring)
    for pool, reference in zip(found.pools, exact.pools, strict=True):
        assert torch.equal(pool, reference)


@pytest.mark.parametrize("make", EVERY_LAYER)
def test_padding_rows_and_tokens_of_no_row_change_nothing(make: Make) -> None:
    """A captured step has more rows than decode, tokens that no row feeds, and room for more tokens to compute."""
    (found, slots, positions), (exact, _, _) = drawn(make, BF16), drawn(make, BF16)
    drafts, fed = Drafts.of(REPLAYS, FED, range(4)), sum(FED)
    padded = replace(Drafts.of([*REPLAYS, 0, 0, 0], [*FED, 1, 1, 0], [0, 1, 2, 3, 4, 4, 4]), tokens=40)
    more = torch.cat([slots, torch.tensor([6, 6, 6])]), torch.cat([positions, torch.zeros(3, dtype=torch.int64)])
    with gpu.computes_for("cpu"):
        y = exact.feed(list(range(fed)), slots, positions, drafts, exact.ring)
        [padded_y] = poisoned(lambda: [found.feed(list(range(fed + 5)), *more, padded, found.ring)])
    assert torch.equal(padded_y[:fed], y)
    assert padded_y.isfinite().all()
    for pool, expected in zip(found.pools, exact.pools, strict=True):
        assert torch.equal(pool[: SLOTS - 1], expected[: SLOTS - 1])
    assert torch.equal(found.ring, exact.ring)


@every_layer
@pytest.mark.parametrize("typical", [False, True], ids=["small", "typical"])
def test_few_launches_of_the_same_kernels_and_nothing_read_on_the_host(make: Make, typical: bool) -> None:
    """Meta tensors have no numbers to read. Other numbers of rows and tokens compile no other kernels."""
    launches = list[gpu.Launch]()
    for replays, fed in ((REPLAYS, FED), ([0], [2]), ([3], [0])):
        rows, tokens = len(fed), list(range(sum(fed)))
        layer, drafts = make(3, BF16, BF16, rows, typical, META), Drafts.of(replays, fed, range(rows), META)
        inputs = [x[tokens] for x in layer.inputs]
        index = torch.empty(rows, dtype=torch.int64, device="meta")
        arguments = (*inputs, layer.constants, *layer.pools, index, index, drafts, layer.ring)
        with gpu.computes_for("meta"), gpu.watched(launches.append), Operations() as operations:
            y = layer.decode_drafts(*arguments)
        assert operations.names == {"aten::empty"}
        assert y.shape == (sum(fed), layer.pools[1][0, :, :, 0].numel())
    several, one, replayed = launches[:LAUNCHES], launches[LAUNCHES : 2 * LAUNCHES], launches[2 * LAUNCHES :]
    assert [each.constants for each in several] == [each.constants for each in one]
    assert [each.constants for each in several[:-1]] == [each.constants for each in replayed]  # no token has a norm


def test_rings_that_do_not_fit_are_refused() -> None:
    for make in LAYERS:
        layer, drafts = make(3, F32, F32, 1, False, META), Drafts.of([0], [MOST_DRAFTS + 2], [0], META)
        index, inputs = torch.empty(1, dtype=torch.int64, device="meta"), [x[:1] for x in layer.inputs]
        for ring in (layer.ring, layer.ring[:, :, 1:], layer.ring.bfloat16()):
            with gpu.computes_for("meta"), pytest.raises(ValueError, match="ring"):
                layer.decode_drafts(*inputs, layer.constants, *layer.pools, index, index, drafts, ring)
