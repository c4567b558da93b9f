"""The gated short convolution in Triton: its definition, and the same bits in prompts, decoded, and with drafts."""

import pytest
import torch

from baton.kernels.drafts import Drafts
from baton.kernels.runtime import triton as gpu
from baton.kernels.short_conv import short_conv_decode_drafts, triton
from tests.kernels.gpu.mamba2.test_decode import Operations
from tests.kernels.packing import Packed, pack
from tests.kernels.rounding import assert_rounded, largest
from tests.kernels.short_conv.test_short_conv import assert_defined, drawn, plan_of

F32 = torch.float32


@pytest.mark.parametrize("shape", [(3, 300), (1, 5), (4, 20)], ids=str)
def test_prompts_and_decoding_rows_follow_the_definition(shape: tuple[int, int]) -> None:
    packed = pack([4, 70, 1], [60, 3, 0], [(0, 61), (0, 63), (0, 64), (1, 4), (1, 70), (2, 1)])
    for seed in range(2):
        before = drawn(packed.tokens, packed.pool_size, shape, seed=seed)
        found = before.again()
        y = triton.short_conv_prefill(found.projected, found.constants, found.pool, plan_of(packed, shape[0]))
        assert_defined(found, y, before, packed)
        rows = Packed([0, 1, 2, 3], [9, 0, 4], [4, 0, 5], [], 6)
        before = drawn(3, 6, shape, seed=seed)
        found, slots = before.again(), torch.tensor(rows.slots)
        y = triton.short_conv_decode(found.projected, found.constants, found.pool, slots, slots)
        assert_defined(found, y, before, rows)


def test_a_prompt_has_the_bits_of_its_tokens_one_by_one() -> None:
    once, decoded = drawn(12, 2, (3, 20), seed=1), drawn(12, 2, (3, 20), seed=1)
    plan = plan_of(Packed([0, 12], [0], [1], [], 2), 3)
    exact = triton.short_conv_prefill(once.projected, once.constants, once.pool, plan)
    for token in range(12):
        at = torch.tensor([token])
        y = triton.short_conv_decode(decoded.projected[at], decoded.constants, decoded.pool, torch.tensor([1]), at)
        assert torch.equal(y[0], exact[token])
    assert torch.equal(decoded.memory, once.memory)


def test_results_states_and_rings_with_drafts_are_the_references() -> None:
    drafts = Drafts.of([2, 0, 3, 1], [3, 2, 0, 1], [3, 0, 4, 1])
    slots, positions = torch.tensor([4, 0, 2, 5]), torch.tensor([1000, 50, 7, 2**33])
    found, exact = drawn(6, 7, (3, 20), seed=1), drawn(6, 7, (3, 20), seed=1)
    ring = torch.randn(5, 4, 20, generator=torch.Generator().manual_seed(2))
    rings = ring.clone(), ring.clone()
    with gpu.computes_for("cpu"):
        y = short_conv_decode_drafts(found.projected, found.constants, found.pool, slots, positions, drafts, rings[0])
    expected = short_conv_decode_drafts(
        exact.projected, exact.constants, exact.pool, slots, positions, drafts, rings[1]
    )
    size = largest(ring, found.memory, found.projected) ** 3 * (found.constants.taps.abs().sum(0) + 1)
    assert_rounded(y, expected, 5, size.expand(6, 20))
    assert torch.equal(rings[0], rings[1]) and not torch.equal(rings[0], ring)
    assert torch.equal(found.memory, exact.memory)


def test_rows_take_one_launch_and_nothing_is_read_on_the_host() -> None:
    """Meta tensors have no numbers to read. Other numbers of rows and tokens compile no other kernels."""
    launches, constants = list[gpu.Launch](), drawn(1, 1, (3, 300)).constants
    taps, bias = constants.taps.to("meta"), None
    on_meta = type(constants)(taps, bias)
    for replays, fed in (([2, 0], [3, 1]), ([0], [2]), ([3], [0])):
        tokens, rows = sum(fed), len(fed)
        index, pool = torch.empty(rows, dtype=torch.int64, device="meta"), torch.empty(7, 2, 300, device="meta")
        projected, ring = torch.empty(tokens, 900, device="meta"), torch.empty(rows, 4, 300, device="meta")
        drafts = Drafts.of(replays, fed, range(rows), torch.device("meta"))
        with gpu.computes_for("meta"), gpu.watched(launches.append), Operations() as operations:
            y = short_conv_decode_drafts(projected, on_meta, pool, index, index, drafts, ring)
        assert operations.names == {"aten::empty"} and y.shape == (tokens, 300)
    assert len(launches) == 3 and all(each.constants == launches[0].constants for each in launches)


def test_rings_that_do_not_fit_are_refused() -> None:
    inputs, slots = drawn(2, 3, (3, 20)), torch.tensor([1])
    for ring in (torch.zeros(1, 1, 19), torch.zeros(1, 1, 20, dtype=torch.bfloat16), torch.zeros(1, 0, 20)):
        with gpu.computes_for("cpu"), pytest.raises(ValueError, match="ring"):
            drafts = Drafts.of([0], [2], [0])
            short_conv_decode_drafts(inputs.projected, inputs.constants, inputs.pool, slots, slots, drafts, ring)
