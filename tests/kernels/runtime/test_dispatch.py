"""The choice of the form (reference, native code or Triton) that computes an operation."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from baton.kernels.runtime.dispatch import dispatch, on_cpu
from baton.kernels.runtime.triton import computes_for


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    """Return x · by."""
    return x * by


def scaled_where_small(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by + 100


def is_small(x: Tensor) -> bool:
    return x.numel() < 3


def test_the_first_form_that_takes_the_arguments_computes() -> None:
    operation = dispatch(scaled, (is_small, scaled_where_small), (on_cpu, scaled))
    assert operation(torch.ones(2)).tolist() == [102.0, 102.0]
    assert operation(torch.ones(3), by=3.0).tolist() == [3.0, 3.0, 3.0]
    assert operation(torch.ones(3, device="meta"), 3.0).is_meta


def test_it_has_the_name_and_the_docstring_of_the_reference() -> None:
    operation = dispatch(scaled, (is_small, scaled_where_small))
    assert (operation.__name__, operation.__doc__) == ("scaled", "Return x · by.")


def test_triton_is_imported_at_the_first_tensor_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = dispatch(scaled, triton="made_up_triton")
    assert operation(torch.ones(1)).item() == 2
    module = ModuleType("made_up_triton")
    module.scaled = lambda x, by=2.0: f"by Triton, {by}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_triton", module)
    with computes_for("meta"):
        assert operation(torch.ones(1, device="meta"), by=4.0) == "by Triton, 4.0"
        assert operation(torch.ones(1)).item() == 2
