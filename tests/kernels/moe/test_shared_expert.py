import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.moe.shared_expert import add_shared, native, reference
from tests.kernels.rounding import SIGMOID, assert_rounded


@pytest.mark.usefixtures("target")
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 99), rows=st.integers(0, 20), width=st.integers(1, 100), gated=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_native_code_adds_the_shared_expert(seed: int, rows: int, width: int, gated: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    routed, shared, drawn = (torch.randn(rows, size, generator=g).to(dtype) for size in (width, width, 1))
    gate = drawn if gated else None
    assert native.takes(routed, shared, gate)
    share = shared.double() * (drawn.double().sigmoid() if gated else 1)
    size = routed.double().abs() + share.abs()
    for found in (add_shared(routed, shared, gate), reference.add_shared(routed, shared, gate)):
        assert found.dtype == dtype
        assert_rounded(found, routed.double() + share, SIGMOID + 2, size)


def test_torch_adds_it_where_there_is_no_native_code() -> None:
    routed, shared = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 8.0]])
    assert add_shared(routed, shared).tolist() == [[5.0, 10.0]]
    assert add_shared(routed, shared, torch.zeros(1, 1)).tolist() == [[3.0, 6.0]]
