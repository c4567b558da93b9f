import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.moe.routing import RoutingRule, native, reference
from baton.kernels.runtime import cpp
from baton.models.config import ModelError
from baton.models.layers.experts import SigmoidRouter, SoftmaxRouter
from tests.kernels.rounding import FUNCTION, SIGMOID, assert_rounded, largest, likely

F32, BF16 = torch.float32, torch.bfloat16
few = settings(max_examples=30, deadline=None)


@st.composite
def rules(draw: st.DrawFn) -> tuple[int, RoutingRule]:
    """Draw a number of experts, and a routing rule for them."""
    groups, each = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    if draw(st.booleans()):
        rule = RoutingRule(draw(st.integers(1, groups * each)), "softmax", draw(st.booleans()))
        return groups * each, rule
    best_groups = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, best_groups * each))
    return groups * each, RoutingRule(
        top_k, "sigmoid", draw(st.booleans()), groups, best_groups, draw(st.sampled_from([1.0, 2.5]))
    )


def drawn(seed: int, rows: int, inputs: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, router = torch.randn(rows, inputs, generator=g), torch.randn(experts, inputs, generator=g) * inputs**-0.5
    return x.to(dtype), router.to(dtype), torch.randn(experts, generator=g)


def one_by_one(logits: list[float], bias: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    """Choose and weigh the experts of one token with Python floats."""
    values = torch.tensor(logits, dtype=torch.float64)
    scores = (values.softmax(0) if rule.scores == "softmax" else values.sigmoid()).tolist()
    ranking = scores if rule.scores == "softmax" else [score + add for score, add in zip(scores, bias, strict=True)]
    each = len(ranking) // rule.groups
    members = [range(group * each, (group + 1) * each) for group in range(rule.groups)]
    worth = [sum(sorted((ranking[i] for i in group), reverse=True)[:2]) for group in members]
    best = sorted(range(rule.groups), key=lambda group: -worth[group])[: rule.groups_kept]
    candidates = [i for group in sorted(best) for i in members[group]]
    chosen = sorted(candidates, key=lambda i: -ranking[i])[: rule.top_k]
    total = sum(scores[i] for i in chosen) if rule.renormalise else 1.0
    return chosen, [scores[i] / total * rule.scale for i in chosen]


def assert_weighs(found: Tensor, exact: Tensor, x: Tensor, router: Tensor) -> None:
    """Compare experts' weights: quotients of exponentials, whose relative error is the error of the logits."""
    terms = x.shape[1] + len(router) + SIGMOID + 2 * FUNCTION
    assert_rounded(found, exact, terms, 2 * (1 + largest(x.float() @ router.float().t())) * exact.double(), likely)


@few
@given(seed=st.integers(0, 99), rows=st.integers(1, 20), shape=rules())
def test_the_best_experts_are_chosen_and_weighed(seed: int, rows: int, shape: tuple[int, RoutingRule]) -> None:
    count, rule = shape
    x, router, bias = drawn(seed, rows, 24, count, F32)
    chosen, weights = reference.route(x, router, bias if rule.scores == "sigmoid" else None, rule)
    assert (chosen.dtype, weights.dtype) == (torch.int32, F32)
    assert chosen.shape == weights.shape == (rows, rule.top_k)
    for row, logits in enumerate((x.double() @ router.double().t()).tolist()):
        best, exact = one_by_one(logits, bias.tolist(), rule)
        assert chosen[row].tolist() == best
        assert_weighs(weights[row], torch.tensor(exact, dtype=torch.float64), x, router)


def test_the_first_expert_wins_a_tie() -> None:
    router = torch.ones(12, 3)
    chosen, weights = reference.route(torch.ones(2, 3), router, None, RoutingRule(4, "softmax", True))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2
    rule = RoutingRule(4, "sigmoid", True, groups=4, groups_kept=2)
    chosen, _ = reference.route(torch.ones(2, 3), router, torch.tensor([0.0] * 6 + [1.0] * 6), rule)
    assert chosen.tolist() == [[6, 7, 8, 9]] * 2


def test_a_softmax_over_the_chosen_experts_equals_the_renormalised_softmax_over_all() -> None:
    x, weight, _ = drawn(0, 7, 16, 9, F32)
    first, after = SoftmaxRouter(16, 9, 3, True, F32, True), SoftmaxRouter(16, 9, 3, False, F32, False)
    for router in (first, after):
        router.weight.data.copy_(weight)
    assert torch.equal(first(x, None)[1], after(x, None)[1])
    logits, chosen = x @ weight.t(), first(x, None)[0].long()
    assert_weighs(after(x, None)[1], logits.gather(1, chosen).softmax(1), x, weight)


def run(x: Tensor, router: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    return native.route(x, native.pack(router), bias, rule)


@pytest.mark.usefixtures("target")
@few
@given(
    seed=st.integers(0, 99), rows=st.integers(0, 60), inputs=st.integers(1, 70), shape=rules(),
    dtype=st.sampled_from([F32, BF16]), exact=st.booleans(),
)  # fmt: skip
def test_native_code_chooses_the_same(
    seed: int, rows: int, inputs: int, shape: tuple[int, RoutingRule], dtype: torch.dtype, exact: bool
) -> None:
    """Native code and the reference choose alike, for scores without near ties and for integers with many ties.

    exact: the router is float32.
    """
    count, rule = shape
    x, router, bias = drawn(seed, rows, inputs, count, dtype)
    added = bias if rule.scores == "sigmoid" else None
    router = router.float() if exact else router
    chosen, weights = run(x, router, added, rule)
    expected = reference.route(x, router, added, rule)
    clear = clear_choices(x, router, added, rule)
    assert torch.equal(chosen[clear], expected[0][clear])
    assert_weighs(weights[clear], expected[1][clear], x, router)
    x, router = x.sign(), router.sign()
    if rule.scores == "softmax":
        assert torch.equal(run(x, router, None, rule)[0], reference.route(x, router, None, rule)[0])


def clear_choices(x: Tensor, router: Tensor, bias: Tensor | None, rule: RoutingRule) -> Tensor:
    """Return which rows keep their experts under small changes of the inputs: bool [rows]."""
    g, expected = torch.Generator().manual_seed(0), reference.route(x, router, bias, rule)[0]
    changed = [x.float() * (1 + 1e-3 * torch.randn(x.shape, generator=g)) for _ in range(8)]
    same = [(reference.route(other, router, bias, rule)[0] == expected).all(1) for other in changed]
    return torch.stack(same).all(0)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_results_are_batch_invariant_and_independent_of_strides(dtype: torch.dtype) -> None:
    x, router, bias = drawn(0, 130, 75, 40, dtype)
    rule = RoutingRule(6, "sigmoid", True, 4, 2, 2.5)
    together = run(x, router, bias, rule)
    for row in range(130):
        alone = run(x[row, None], router, bias, rule)
        assert torch.equal(alone[0][0], together[0][row]) and torch.equal(alone[1][0], together[1][row])
    wide = torch.full((130, 79), torch.nan, dtype=dtype)
    wide[:, :75] = x
    found = run(wide[:, :75], router, bias, rule)
    assert torch.equal(found[0], together[0]) and torch.equal(found[1], together[1])


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_threads_change_no_bit(rows: int) -> None:
    x, router, bias = drawn(0, rows, 900, 130, BF16)
    rule = RoutingRule(6, "sigmoid", True, 5, 2, 2.5)
    serial = run(x, router, bias, rule)
    for threads in (2, 3):
        cpp.use_threads(threads)
        found = run(x, router, bias, rule)
        assert torch.equal(found[0], serial[0]) and torch.equal(found[1], serial[1])


@pytest.mark.usefixtures("target")
def test_native_code_chooses_the_first_on_a_tie_and_valid_experts_for_nan() -> None:
    rule = RoutingRule(4, "sigmoid", True, groups=4, groups_kept=2)
    x, router, bias = torch.ones(2, 3), torch.ones(12, 3), torch.tensor([0.0] * 6 + [1.0] * 6)
    x[1] = torch.nan
    chosen, weights = run(x, router, bias, rule)
    assert chosen[0].tolist() == [6, 7, 8, 9]
    assert all(0 <= expert < 12 for expert in chosen[1].tolist()) and weights[1].isnan().all()


@pytest.mark.usefixtures("target")
def test_padding_is_routed_nowhere_and_changes_no_other_row() -> None:
    x, router, bias = drawn(0, 5, 24, 12, F32)
    rule, padding = RoutingRule(3, "sigmoid", True), torch.tensor([False, True, False, True, True])
    for by in (reference.route, lambda x, router, *rest: native.route(x, native.pack(router), *rest)):
        plain, _ = by(x, router, bias, rule)
        chosen, _ = by(x, router, bias, rule, padding)
        assert (chosen[padding] == -1).all() and torch.equal(chosen[~padding], plain[~padding])


@pytest.mark.usefixtures("target")
def test_arguments_that_do_not_fit_are_refused() -> None:
    x, router, bias = drawn(0, 3, 8, 40, F32)
    rule = RoutingRule(2, "sigmoid", True)
    with pytest.raises(ValueError, match=r"x is \(3, 7\)"):
        run(x[:, :7], router, bias, rule)
    with pytest.raises(ValueError, match=r"x is .* in torch\.bfloat16"):
        run(x, router.bfloat16(), bias, rule)
    with pytest.raises(ValueError, match="bias is"):
        run(x, router, bias[:5], rule)


@pytest.mark.usefixtures("target")
def test_a_packed_layer_routes_as_the_plain_one() -> None:
    x, weight, bias = drawn(0, 7, 16, 9, F32)
    router = SigmoidRouter(16, 9, RoutingRule(3, "sigmoid", True))
    router.weight.data.copy_(weight)
    router.e_score_correction_bias.data.copy_(bias)
    chosen, weights = router(x, None)
    router.pack(8)
    assert router.packed is not None and router.weight.data_ptr() == router.packed.data.data_ptr()
    assert torch.equal(router(x, None)[0], chosen)
    assert_weighs(router(x, None)[1], weights, x, weight)


@pytest.mark.parametrize(
    ("count", "rule", "fault"),
    [
        (4, RoutingRule(5, "sigmoid", True), "5 of 4 experts"),
        (10, RoutingRule(2, "sigmoid", True, 4, 2), "10 experts cannot lie in 4 groups evenly"),
        (8, RoutingRule(2, "sigmoid", True, 2, 3), "3 of 2 groups"),
        (8, RoutingRule(4, "sigmoid", True, 4, 1), "1 groups of 2 experts hold fewer than 4"),
    ],
)
def test_impossible_rules_are_refused(count: int, rule: RoutingRule, fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        SigmoidRouter(8, count, rule)
