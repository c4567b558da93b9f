import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.moe.routing import RoutingRule, reference, route, triton
from baton.kernels.runtime import triton as gpu
from tests.kernels.gpu.shapes.routing import CASES
from tests.kernels.moe.test_routing import assert_weighs, clear_choices, drawn, rules

F32 = torch.float32
few = settings(max_examples=25, deadline=None)


@few
@given(seed=st.integers(0, 99), rows=st.integers(0, 5), inputs=st.integers(1, 300), shape=rules())
def test_triton_chooses_the_same(seed: int, rows: int, inputs: int, shape: tuple[int, RoutingRule]) -> None:
    count, rule = shape
    x, router, bias = drawn(seed, rows, inputs, count, F32)
    added = bias if rule.scores == "sigmoid" else None
    with gpu.computes_for("cpu"):
        chosen, weights = route(x, router, added, rule)
    expected = reference.route(x, router, added, rule)
    clear = clear_choices(x, router, added, rule)
    assert torch.equal(chosen[clear], expected[0][clear])
    assert_weighs(weights[clear], expected[1][clear], x, router)


def test_the_first_is_chosen_on_a_tie_and_valid_experts_for_nan() -> None:
    x, router, bias = torch.ones(2, 3), torch.ones(12, 3), torch.tensor([0.0] * 6 + [1.0] * 6)
    x[1] = torch.nan
    chosen, weights = triton.route(x, router, bias, RoutingRule(4, "sigmoid", True, groups=4, groups_kept=2))
    assert chosen[0].tolist() == [6, 7, 8, 9]
    assert all(0 <= expert < 12 for expert in chosen[1].tolist()) and weights[1].isnan().all()


def test_padding_is_routed_nowhere_and_changes_no_other_row() -> None:
    x, router, bias = drawn(0, 5, 24, 12, F32)
    rule, padding = RoutingRule(3, "sigmoid", True), torch.tensor([False, True, False, True, True])
    plain, _ = triton.route(x, router, bias, rule)
    chosen, _ = triton.route(x, router, bias, rule, padding)
    assert (chosen[padding] == -1).all() and torch.equal(chosen[~padding], plain[~padding])


def test_results_are_batch_invariant() -> None:
    """Rounded inputs make products exact, so only the order of the splits could change a result."""
    x, router, bias = drawn(0, 70, 700, 20, F32)
    x, router, rule = x.round(), (router * 64).round() / 64, RoutingRule(3, "sigmoid", True, 4, 2)
    together = triton.route(x, router, bias, rule)
    for rows in (1, 17):
        alone = triton.route(x[:rows], router, bias, rule)
        assert torch.equal(alone[0], together[0][:rows]) and torch.equal(alone[1], together[1][:rows])


def test_a_step_launches_two_kernels() -> None:
    for _, run in CASES:
        launches = list[gpu.Launch]()
        with gpu.watched(launches.append):
            run()
        assert len(launches) == 2
