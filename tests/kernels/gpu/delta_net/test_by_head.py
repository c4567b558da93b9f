"""The gated delta rule in Triton: the scan equals the recurrence, and the update of one token equals the reference."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.delta_net.rule import delta_scan, delta_update, reference, triton, triton_by_head, triton_update
from baton.kernels.prefill.plan import plan_prefill
from baton.kernels.runtime import triton as gpu
from baton.kernels.state_pool.rounding import round_stochastically
from tests.kernels.delta_net.rules import BF16, Rule, assert_close, drawn_by_head, recurrence
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack

few = settings(max_examples=6, deadline=None)
SIZES = st.one_of(st.integers(1, 40), st.just(128))


def scan(rule: Rule, packed: Packed) -> torch.Tensor:
    p = packed
    table = plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, 64, 1, torch.device("cpu")).table
    return triton.delta_scan(rule.q, rule.k, rule.v, rule.g, rule.beta, rule.pool, table)


@few
@given(
    packed=packs(),
    keys=st.integers(1, 2),
    ratio=st.integers(1, 2),
    size=SIZES,
    width=SIZES,
    fall=st.sampled_from([0.0, 1.0, 60.0]),
    seed=st.integers(0, 9),
)
def test_equals_the_recurrence_at_every_checkpoint(
    packed: Packed, keys: int, ratio: int, size: int, width: int, fall: float, seed: int
) -> None:
    rule = drawn_by_head(packed.tokens, packed.pool_size, seed, keys, ratio, size, width, fall)
    o, pool = recurrence(rule, packed)
    assert_close(scan(rule, packed), o, rule)
    assert_close(rule.pool, pool, rule)


def test_keys_that_repeat_keep_only_the_last_value() -> None:
    """Equal keys, beta 1 and no decay are the worst case for solving a chunk's equations."""
    packed = pack([70], [0], [])
    rule = drawn_by_head(70, packed.pool_size, keys=1, ratio=1)
    rule.k[:], rule.g[:], rule.beta[:] = rule.k[0].clone(), 0, 1
    rule.k *= rule.k.square().sum(-1, keepdim=True).rsqrt()
    rule.q[:] = rule.k
    assert_close(scan(rule, packed), rule.v.double(), rule)


def test_the_largest_decay_ends_in_zero_and_not_in_nan() -> None:
    packed = pack([64, 30], [0, 5], [(0, 64)])
    rule = drawn_by_head(packed.tokens, packed.pool_size)
    rule.g.fill_(-1e4)
    o, pool = recurrence(rule, packed)
    assert_close(scan(rule, packed), o, rule)
    assert_close(rule.pool, pool, rule)


def test_every_configuration_scans_the_same() -> None:
    packed = pack([70], [0], [])
    rule = drawn_by_head(70, packed.pool_size, 1, 1, 1, 70, 40)
    o, pool = recurrence(rule, packed)
    prepared = triton_by_head.prepare_candidates(70, torch.float32) + triton_by_head.prepare_candidates(70, BF16)
    scanned = triton_by_head.scan_candidates(1, 40, 70, torch.float32, 0) + triton_by_head.scan_candidates(
        1, 40, 70, BF16, 0
    )
    for config in {str(config): config for config in prepared + scanned}.values():
        of_scan = "BLOCK_P" in config.blocks

        def choose(
            kernel: str,
            shape: str,
            offered: tuple[gpu.KernelConfig, ...],
            config: gpu.KernelConfig = config,
            of_scan: bool = of_scan,
        ) -> gpu.KernelConfig:
            return config if kernel.endswith("scan") == of_scan else offered[0]

        found = rule.over(rule.pool.clone())
        with gpu.chosen(choose):
            assert_close(scan(found, packed), o, rule)
        assert_close(found.pool, pool, rule)


@few
@given(
    slots=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
    keys=st.integers(1, 2),
    ratio=st.integers(1, 3),
    size=SIZES,
    width=SIZES,
    fall=st.sampled_from([0.0, 1.0, 300.0]),
)
def test_an_update_equals_the_reference(
    slots: list[int], keys: int, ratio: int, size: int, width: int, fall: float
) -> None:
    found = drawn_by_head(len(slots), 6, len(slots), keys, ratio, size, width, fall)
    f, expected = found, found.over(found.pool.clone())
    at = torch.tensor(slots), torch.tensor(slots) + 2**33
    e = expected
    exact = reference.delta_update(e.q, e.k, e.v, e.g, e.beta, e.pool, *at)
    assert_close(triton_update.delta_update(f.q, f.k, f.v, f.g, f.beta, f.pool, *at), exact, e)
    assert_close(f.pool, e.pool, e)


@pytest.mark.parametrize("states", [torch.float32, BF16])
def test_an_update_from_slot_to_slot(states: torch.dtype) -> None:
    source = drawn_by_head(2, 6, size=20, width=24)
    source = source.over(source.pool.to(states))
    expected, exact = source.over(source.pool.clone()), source.over(source.pool.to(torch.float32, copy=True))
    slots, targets, positions = torch.tensor([4, 0]), torch.tensor([1, 2]), torch.tensor([9, 1000])
    before = source.pool.clone()

    def update(rule: Rule, targets: torch.Tensor | None = None) -> torch.Tensor:
        r = rule
        return triton_update.delta_update(r.q, r.k, r.v, r.g, r.beta, r.pool, slots, positions, targets=targets)

    o = update(source, targets)
    assert torch.equal(o, update(expected)) and torch.equal(o, update(exact))
    assert torch.equal(source.pool[targets], expected.pool[slots])
    if states == BF16:
        assert torch.equal(source.pool[targets], round_stochastically(exact.pool[slots], positions))
    others = [slot for slot in range(6) if slot not in targets]
    assert torch.equal(source.pool[others], before[others])


def test_computes_wherever_triton_does() -> None:
    packed = pack([5, 3], [0, 60], [])
    rule = drawn_by_head(packed.tokens, packed.pool_size)
    expected = rule.over(rule.pool.clone())
    table = plan_prefill(packed.offsets, packed.starts, packed.slots, [], 64, 1, torch.device("cpu")).table
    at = torch.tensor([0, 1]), torch.tensor([5, 6])
    r, e = rule, expected
    with gpu.computes_for("cpu"):
        o = delta_scan(r.q, r.k, r.v, r.g, r.beta, r.pool, table)
        updated = delta_update(r.q[:2], r.k[:2], r.v[:2], r.g[:2], r.beta[:2], r.pool, *at)
    assert torch.equal(o, scan(expected, packed))
    first = e.rows(slice(2))
    exact = triton_update.delta_update(first.q, first.k, first.v, first.g, first.beta, e.pool, *at)
    assert torch.equal(updated, exact)
    assert torch.equal(rule.pool, expected.pool)
