import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kernels.experts import PARTS, Activation, reference

F32, BF16 = torch.float32, torch.bfloat16
ACTIVATIONS = st.sampled_from(["silu_gated", "relu2"])
few = settings(max_examples=30, deadline=None)


def drawn(
    seed: int, rows: int, sizes: tuple[int, int, int, int], activation: Activation, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `experts`; sizes: count, top_k, hidden, intermediate."""
    count, top_k, hidden, inner = sizes
    g = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(rows, hidden, generator=g).to(dtype), torch.rand(rows, top_k, generator=g)
    chosen = torch.rand(rows, count, generator=g).argsort(dim=1)[:, :top_k].int().contiguous()
    first = torch.randn(count, PARTS[activation] * inner, hidden, generator=g) * hidden**-0.5
    second = torch.randn(count, hidden, inner, generator=g) * inner**-0.5
    return x, chosen, weights, first.to(dtype), second.to(dtype)


def exactly(
    x: Tensor, chosen: Tensor, weights: Tensor, first: Tensor, second: Tensor, activation: Activation
) -> Tensor:
    """A token and an expert at a time, in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, places in enumerate(chosen.tolist()):
        for place, expert in enumerate(places):
            if expert < 0:
                continue
            up = first[expert].double() @ x[row].double()
            if activation == "relu2":
                hidden = up.relu() ** 2
            else:
                gate, up = up.chunk(2)
                hidden = F.silu(gate) * up
            y[row] += weights[row, place] * (second[expert].double() @ hidden)
    return y


def assert_near(found: Tensor, exact: Tensor) -> None:
    tolerance = 1e-5 if found.dtype == F32 else 0.02
    size = float(exact.abs().max()) if len(exact) else 0.0
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * size)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    count = draw(st.integers(1, 12))
    return count, draw(st.integers(1, min(count, 5))), draw(st.integers(1, 70)), draw(st.integers(1, 70))


@few
@given(seed=st.integers(0, 99), rows=st.integers(0, 20), sizes=shapes(), activation=ACTIVATIONS)
def test_each_token_gets_its_experts(
    seed: int, rows: int, sizes: tuple[int, int, int, int], activation: Activation
) -> None:
    arguments = drawn(seed, rows, sizes, activation, F32)
    assert_near(reference.experts(*arguments, activation), exactly(*arguments, activation))


def test_padding_gets_nothing() -> None:
    x, chosen, *rest = drawn(0, 5, (4, 2, 8, 8), "silu_gated", F32)
    chosen[3] = -1
    chosen[4, 0] = -1
    y = reference.experts(x, chosen, *rest, "silu_gated")
    assert (y[3] == 0).all() and (y[4] != 0).any()
    assert_near(y, exactly(x, chosen, *rest, "silu_gated"))
