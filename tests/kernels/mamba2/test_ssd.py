from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.kernels.mamba2.ssd import cpu, reference
from baton.kernels.prefill.scan import ChunkPlan, plan_chunks
from tests.kernels.packing import Inputs, Packed, assert_is_the_recurrence, pack, random_inputs, random_packed

Form = Callable[..., Tensor]
FORMS = pytest.mark.parametrize("form", [reference.ssd_prefill, cpu.ssd_prefill], ids=["reference", "cpu"])


def plan(packed: Packed, chunk_size: int) -> ChunkPlan:
    device = torch.device("cpu")
    return plan_chunks(packed.offsets, packed.starts, packed.slots, packed.checkpoints, chunk_size, device)


def run(form: Form, inputs: Inputs, packed: Packed, chunk_size: int) -> tuple[Tensor, Tensor]:
    pool = inputs.pool.clone()
    i = inputs
    return form(i.x, i.dt, i.A, i.B, i.C, i.D, pool, plan(packed, chunk_size)), pool


@FORMS
@pytest.mark.parametrize("seed", range(6))
def test_packed_prefill_equals_recurrence_at_every_checkpoint(form: Form, seed: int) -> None:
    packed = random_packed(seed)
    inputs = random_inputs(packed.tokens, packed.pool_size, seed)
    chunk_size = (16, 64, 100)[seed % 3]
    assert_is_the_recurrence(*run(form, inputs, packed, chunk_size), inputs, packed, chunk_size)


@FORMS
@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_states_are_rounded_when_written_and_not_between_chunks(form: Form, seed: int) -> None:
    packed = random_packed(seed)
    inputs = random_inputs(packed.tokens, packed.pool_size, seed)
    rounded = replace(inputs, pool=inputs.pool.bfloat16())
    y, pool = run(form, rounded, packed, chunk_size=16)
    exact_y, exact_pool = run(form, replace(rounded, pool=rounded.pool.float()), packed, chunk_size=16)
    assert torch.equal(y, exact_y)
    assert torch.equal(pool, exact_pool.bfloat16())


@FORMS
@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (5, 5), (8, 4)])
def test_heads_read_their_group(form: Form, heads: int, groups: int) -> None:
    packed = pack([50, 7], [0, 30], [(0, 33)])
    inputs = random_inputs(packed.tokens, packed.pool_size, 1, heads, groups)
    assert_is_the_recurrence(*run(form, inputs, packed, chunk_size=16), inputs, packed, chunk_size=16)


@FORMS
def test_second_request_of_a_packed_prefill_gets_its_own_state_sglang_15829(form: Form) -> None:
    """Request 2 has a checkpoint at its position 256, which is no chunk boundary of the packed batch (100 + 256 = 356).

    SGLang's bug 15829 saved the state at position 156. Chunks that are cut at each request's own positions have a
    boundary at 256.
    """
    packed = pack([100, 300], [0, 0], [(1, 256)])
    inputs = random_inputs(packed.tokens, packed.pool_size, 15829)
    inputs.pool.zero_()
    y, pool = run(form, inputs, packed, chunk_size=128)

    alone, i, rows = Packed([0, 256], [0], [0], [], 1), inputs, slice(100, 356)
    own = Inputs(i.x[rows], i.dt[rows], i.A, i.B[rows], i.C[rows], i.D, i.pool[:1])
    assert_is_the_recurrence(y[rows], pool[packed.checkpoints[0][2], None], own, alone, chunk_size=128)


@FORMS
def test_result_does_not_depend_on_the_rest_of_the_batch(form: Form) -> None:
    packed = pack([40, 130, 9], [0, 70, 3], [])
    inputs = random_inputs(packed.tokens, packed.pool_size, 2)
    y, pool = run(form, inputs, packed, chunk_size=64)
    alone, i, rows, slot = Packed([0, 130], [70], [0], [], 1), inputs, slice(40, 170), packed.slots[1]
    own = Inputs(i.x[rows], i.dt[rows], i.A, i.B[rows], i.C[rows], i.D, i.pool[slot, None])
    for found in ((y[rows], pool[slot, None]), run(form, own, alone, chunk_size=64)):
        assert_is_the_recurrence(*found, own, alone)


@FORMS
def test_a_poisoned_request_does_not_reach_its_neighbours(form: Form) -> None:
    packed = pack([20, 33, 5], [0, 0, 0], [(0, 7), (2, 5)])
    inputs = random_inputs(packed.tokens, packed.pool_size, 3)
    inputs.x[20:53] = torch.nan
    y, pool = run(form, inputs, packed, chunk_size=16)
    assert_is_the_recurrence(y, pool, inputs, packed, chunk_size=16)
    assert y[:20].isfinite().all() and y[53:].isfinite().all()


@FORMS
def test_strong_decay_underflows_to_zero_and_not_to_nan(form: Form) -> None:
    packed = pack([64], [0], [(0, 64)])
    inputs = random_inputs(packed.tokens, packed.pool_size, 4)
    inputs.dt.fill_(4)
    inputs.A.fill_(-32)
    assert_is_the_recurrence(*run(form, inputs, packed, chunk_size=64), inputs, packed)


def test_chunks_end_at_absolute_multiples_and_at_checkpoints() -> None:
    packed = pack([100, 300], [250, 10], [(0, 260), (1, 256), (1, 310)])
    chunks = plan(packed, chunk_size=128).chunks
    ends = {0: list[int](), 1: list[int]()}
    for chunk in sorted(chunks, key=lambda c: c.begin):
        segment = 0 if chunk.end <= 100 else 1
        assert chunk.begin >= packed.offsets[segment]
        ends[segment].append(chunk.end - packed.offsets[segment] + packed.starts[segment])
    assert ends == {0: [256, 260, 320, 350], 1: [64, 128, 192, 256, 310]}


def test_a_long_chunk_is_divided_at_offsets_from_its_absolute_start() -> None:
    packed = pack([600], [100], [])
    ends = [chunk.end + 100 for chunk in plan(packed, chunk_size=256).chunks]
    assert ends == [128, 192, 256, 320, 384, 448, 512, 576, 640, 700]
    ends = [chunk.end + 100 for chunk in plan(packed, chunk_size=100).chunks]
    assert ends == [150, 200, 250, 300, 350, 400, 450, 500, 550, 600, 650, 700]


def test_rounds_hold_one_chunk_a_segment_longest_first() -> None:
    packed = pack([10, 100, 40], [0, 0, 0], [])
    made = plan(packed, chunk_size=32)
    assert made.rows == (packed.slots[1], packed.slots[2], packed.slots[0])
    assert [[chunk.row for chunk in chunks] for chunks in made.rounds] == [[0, 1, 2], [0, 1], [0], [0]]


@pytest.mark.parametrize(("length", "position"), [(10, 5), (10, 16), (0, 6)])
def test_plan_refuses_empty_segments_and_checkpoints_outside_their_segment(length: int, position: int) -> None:
    with pytest.raises(ValueError, match="segment"):
        plan_chunks([0, length], [5], [0], [(0, position, 1)], 16, torch.device("cpu"))
