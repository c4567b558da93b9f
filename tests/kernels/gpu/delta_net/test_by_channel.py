"""The delta rule with a decay for each channel (KDA) in Triton: the scan and the update of one token."""

import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.delta_net.rule import delta_update, reference, triton, triton_by_channel, triton_update
from baton.kernels.prefill.plan import plan_prefill
from baton.kernels.runtime import triton as gpu
from tests.kernels.delta_net.rules import BF16, F32, FALLS, Rule, assert_close, drawn_by_channel, recurrence
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack

few = settings(max_examples=4, deadline=None)
SIZES = st.integers(1, 40)


def scan(rule: Rule, packed: Packed) -> torch.Tensor:
    p = packed
    table = plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, 64, 1, torch.device("cpu")).table
    return triton.delta_scan(rule.q, rule.k, rule.v, rule.g, rule.beta, rule.pool, table)


@few
@given(
    packed=packs(),
    falls=st.sampled_from(FALLS),
    size=st.one_of(SIZES, st.just(128)),
    width=SIZES,
    seed=st.integers(0, 9),
)
def test_the_scan_equals_the_recurrence_at_every_checkpoint(
    packed: Packed, falls: list[float], size: int, width: int, seed: int
) -> None:
    rule = drawn_by_channel(packed.tokens, packed.pool_size, seed, 2, size, width, falls)
    o, pool = recurrence(rule, packed)
    assert_close(scan(rule, packed), o, rule)
    assert_close(rule.pool, pool, rule)


def test_every_configuration_scans_the_same() -> None:
    packed = pack([70], [0], [])
    rule = drawn_by_channel(70, packed.pool_size, 1, 1, 70, 40)
    o, pool = recurrence(rule, packed)
    related = triton_by_channel.decay_candidates(70)
    for dtype, shared in ((F32, 0), (BF16, 0), (BF16, 227 * 1024)):
        related += triton_by_channel.relate_candidates(70, dtype, shared)
    scanned = triton_by_channel.scan_candidates(1, 40, 70, F32, 0) + triton_by_channel.scan_candidates(
        1, 40, 70, BF16, 0
    )
    for config in {str(config): config for config in related + scanned}.values():

        def choose(
            kernel: str, shape: str, offered: tuple[gpu.KernelConfig, ...], config: gpu.KernelConfig = config
        ) -> gpu.KernelConfig:
            return config if config.blocks.keys() == offered[0].blocks.keys() else offered[0]

        found = rule.over(rule.pool.clone())
        with gpu.chosen(choose):
            assert_close(scan(found, packed), o, rule)
        assert_close(found.pool, pool, rule)


@few
@given(falls=st.sampled_from(FALLS), size=SIZES, width=SIZES)
def test_an_update_equals_the_reference(falls: list[float], size: int, width: int) -> None:
    found = drawn_by_channel(3, 6, 3, 2, size, width, falls)
    expected, at = found.over(found.pool.clone()), (torch.tensor([4, 0, 2]), torch.tensor([5, 0, 2**33]))
    f, e = found, expected
    exact = reference.delta_update(e.q, e.k, e.v, e.g, e.beta, e.pool, *at)
    found_o = triton_update.delta_update(f.q, f.k, f.v, f.g, f.beta, f.pool, *at)
    assert_close(found_o, exact, e)
    assert_close(f.pool, e.pool, e)


def test_computes_wherever_triton_does() -> None:
    packed, at = pack([5, 3], [0, 60], []), (torch.tensor([1, 3]), torch.tensor([1, 3]))
    rule = drawn_by_channel(packed.tokens, packed.pool_size)
    other = rule.over(rule.pool.clone())
    first, e = rule.rows(slice(2)), other.rows(slice(2))
    with gpu.computes_for("cpu"):
        o = rule.prefill(packed)
        updated = delta_update(first.q, first.k, first.v, first.g, first.beta, rule.pool, *at)
    assert torch.equal(o, scan(other, packed))
    assert torch.equal(updated, triton_update.delta_update(e.q, e.k, e.v, e.g, e.beta, other.pool, *at))
    assert torch.equal(rule.pool, other.pool)
