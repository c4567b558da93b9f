"""Experts in Triton: equal to the reference for any choice of experts, and batch-invariant."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels.moe.experts import PARTS, Activation, experts, pack, triton
from baton.kernels.moe.experts.triton_sort import most_tiles, sort_pairs
from baton.kernels.moe.shared_expert import add_shared, reference
from baton.kernels.runtime import triton as gpu
from tests.kernels.gpu.shapes.experts import EXPERTS
from tests.kernels.moe.test_experts import ACTIVATIONS, BOTH, assert_near, drawn, exactly, rounded, shapes
from tests.kernels.rounding import SIGMOID, assert_rounded

F32 = torch.float32
few = settings(max_examples=20, deadline=None)


def by_triton(*arguments: Tensor, activation: Activation, bits: int | None = None) -> Tensor:
    x, chosen, weights, first, second = arguments
    with gpu.computes_for("cpu"):
        stacks = pack(first, PARTS[activation], bits), pack(second, 1, bits)
        assert stacks[0] is None or stacks[0].layout == "triton"
        return experts(x, chosen, weights, stacks[0] or first, stacks[1] or second, activation)


@few
@given(
    seed=st.integers(0, 99), count=st.integers(1, 9), tile_rows=st.sampled_from([1, 4, 16]), rows=st.integers(1, 40),
    top_k=st.integers(1, 4),
)  # fmt: skip
def test_pairs_are_sorted_and_cut_into_tiles(seed: int, count: int, tile_rows: int, rows: int, top_k: int) -> None:
    """Pairs (a token and an expert) are sorted by expert, also if some experts or all of them have none."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1, count + 1, (rows, top_k), generator=g, dtype=torch.int32)
    order, tiles = sort_pairs(chosen, count, tile_rows)
    assert len(tiles) == most_tiles(rows * top_k, count, tile_rows)
    found = [(expert, order[first : first + size].tolist()) for expert, first, size in tiles.tolist() if size]
    assert all(len(pairs) <= tile_rows for _, pairs in found)
    given_to = {expert: [pair for other, pairs in found if other == expert for pair in pairs] for expert, _ in found}
    flat = chosen.flatten().tolist()
    assert given_to == {e: [i for i, other in enumerate(flat) if other == e] for e in range(count) if e in flat}


@few
@given(seed=st.integers(0, 99), rows=st.integers(0, 5), sizes=shapes(), activation=ACTIVATIONS)
def test_triton_gives_each_token_its_experts(
    seed: int, rows: int, sizes: tuple[int, int, int, int], activation: Activation
) -> None:
    arguments = drawn(seed, rows, sizes, activation, F32)
    assert_near(by_triton(*arguments, activation=activation), exactly(*arguments, activation))


@pytest.mark.parametrize("activation", BOTH)
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_may_be_integers(activation: Activation, bits: int) -> None:
    x, chosen, weights, first, second = drawn(0, 7, (4, 2, 140, 70), activation, F32)
    exact = exactly(x, chosen, weights, rounded(first, PARTS[activation], bits), rounded(second, 1, bits), activation)
    assert_near(by_triton(x, chosen, weights, first, second, activation=activation, bits=bits), exact)


def test_padding_gets_nothing_and_changes_nothing() -> None:
    x, chosen, *rest = drawn(0, 5, (4, 2, 8, 8), "relu2", F32)
    chosen[3] = -1
    chosen[4, 0] = 4
    x[3] = torch.nan
    y = by_triton(x, chosen, *rest, activation="relu2")
    x[3], chosen[4, 0] = 0, -1
    assert (y[3] == 0).all()
    assert_near(y, exactly(x, chosen, *rest, "relu2"))


def test_one_expert_may_have_every_token() -> None:
    x, chosen, *rest = drawn(0, 40, (3, 1, 20, 24), "silu_gated", F32)
    chosen[:] = 1
    assert_near(by_triton(x, chosen, *rest, activation="silu_gated"), exactly(x, chosen, *rest, "silu_gated"))


def test_results_are_batch_invariant() -> None:
    x, chosen, weights, *stacks = drawn(0, 40, (3, 2, 40, 24), "silu_gated", F32)
    together = by_triton(x, chosen, weights, *stacks, activation="silu_gated")
    for row in (0, 17, 39):
        alone = by_triton(x[row, None], chosen[row, None], weights[row, None], *stacks, activation="silu_gated")
        exact = exactly(x[row, None], chosen[row, None], weights[row, None], *stacks, "silu_gated")
        for found in (alone, together[row, None]):
            assert_near(found, exact)


@pytest.mark.parametrize("gated", [False, True])
def test_the_shared_expert_is_added(gated: bool) -> None:
    g = torch.Generator().manual_seed(0)
    routed, shared, gate = (torch.randn(3, size, generator=g) for size in (70, 70, 1))
    with gpu.computes_for("cpu"):
        found = add_shared(routed, shared, gate if gated else None)
    exact = reference.add_shared(routed, shared, gate if gated else None)
    assert_rounded(found, exact, SIGMOID + 2, routed.abs() + shared.abs())


def test_steps_consist_of_launches_and_read_nothing_back() -> None:
    names, launches = list[str](), list[gpu.Launch]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(func.__name__.partition(".")[0])
            return func(*args, **(kwargs or {}))

    for name, run in EXPERTS:
        names.clear()
        launches.clear()
        with gpu.watched(launches.append), Counting():
            run()
        assert len(launches) == 5
        assert set(names) <= {"empty", "empty_like"}, name
        config = launches[2].config
        assert config.blocks["BLOCK_OUT"] >= 64 and config.warps >= 4
        assert config in triton.candidates(config.blocks["BLOCK_ROWS"], F32 if "float32" in name else torch.bfloat16)
