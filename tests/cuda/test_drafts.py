"""Decoding with drafts on a GPU gives the results of decoding one token at a time.

The bits are the same where the products of projections have the same number of rows. cuBLAS chooses its kernel by the
number of rows, and two kernels may sum in different orders, so results with drafts otherwise differ by rounding.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.drafts import MOST_DRAFTS, Drafts
from baton.kernels.linear.dense import cpu as dense
from baton.kernels.linear.per_head import cpu as per_head
from baton.models.loading.checkpoint import random_model
from tests.kernels.drafts.layers import EVERY_LAYER, Make, assert_drafts_change_no_bit
from tests.models.drafting import MOST, ROWS, assert_drafts_change_nothing
from tests.models.oracle import CHECKPOINTS, settings_of

CUDA = torch.device("cuda", 0)
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
MOST_TOKENS = ROWS * (1 + MOST)


@pytest.fixture
def equal_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute each projection for MOST_TOKENS rows, some of which are zeros."""

    def padded(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(x: Tensor, *more: object) -> Tensor:
            missing = MOST_TOKENS - len(x)
            return form(F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)), *more)[: len(x)]

        return compute

    for module, name in ((dense, "linear"), (per_head, "head_linear")):
        monkeypatch.setattr(module, name, padded(getattr(module, name)))


@DTYPES
@pytest.mark.usefixtures("equal_products")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafts_change_no_bit(name: str, dtype: torch.dtype) -> None:
    assert_drafts_change_nothing(random_model(settings_of(name), dtype, CUDA, seed=0), device=CUDA)


@pytest.mark.usefixtures("equal_products")
@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_next", "kimi_linear"])
def test_states_in_bfloat16_are_rounded_alike(name: str) -> None:
    assert_drafts_change_nothing(random_model(settings_of(name), BF16, CUDA, 1, BF16), 1, CUDA)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafts_change_results_only_by_rounding(name: str) -> None:
    """A float32 product of up to 300 columns differs by at most 300 · 2**-24 of its terms, about 2e-5."""

    def assert_close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    assert_drafts_change_nothing(random_model(settings_of(name), F32, CUDA, 0), 0, CUDA, assert_close)


@pytest.mark.parametrize("typical", [False, True], ids=["small", "typical"])
@pytest.mark.parametrize("states", [F32, BF16], ids=lambda dtype: f"states in {dtype}")
@DTYPES
@pytest.mark.parametrize("make", EVERY_LAYER)
def test_a_layers_kernels_change_no_bit(make: Make, dtype: torch.dtype, states: torch.dtype, typical: bool) -> None:
    for seed in range(2 if typical else 6):
        rows = seed % 4 + 1
        assert_drafts_change_no_bit(make(seed, dtype, states, rows, typical, CUDA), rows, seed)


@pytest.mark.parametrize("states", [F32, BF16], ids=lambda dtype: f"states in {dtype}")
@pytest.mark.parametrize("make", EVERY_LAYER)
def test_a_captured_step_computes_other_numbers_of_tokens(make: Make, states: torch.dtype) -> None:
    """A graph of six rows and 16 tokens serves four rows that feed fewer; the other two rows are padding."""
    found, exact = make(0, BF16, states, 4, True, CUDA), make(0, BF16, states, 4, True, CUDA)
    slots, rings, padding = numbers([4, 0, 2, 5, 6, 6]), numbers([0, 1, 2, 3, 4, 4]), [1, 0]
    inputs, positions = [x[:16].clone() for x in found.inputs], numbers([0] * 6)
    drafts = Drafts(numbers([*range(7)]), numbers([*range(7)]), rings, 40, MOST_DRAFTS)
    where = (found.constants, *found.pools, slots, positions, drafts, found.ring)
    found.decode_drafts(*inputs, *where)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = found.decode_drafts(*inputs, *where)
    for pool, original in zip(found.pools, exact.pools, strict=True):
        pool.copy_(original)
    at, replays = [1000, 7, 2**33, 50], [0, 0, 0, 0]
    for fed, accepted in (([5, 1, 3, 2], [4, 0, 1, 1]), ([1, 6, 1, 1], [0, 5, 0, 0]), ([2, 2, 0, 9], [1, 1, 0, 3])):
        step = Drafts.of([*replays, 0, 0], [*fed, *padding], range(6), CUDA)
        drafts.begins.copy_(step.begins)
        drafts.offsets.copy_(step.offsets)
        positions.copy_(numbers([*at, 0, 0]))
        graph.replay()
        tokens = list(range(sum(fed)))
        rows = Drafts.of(replays, fed, range(4), CUDA)
        expected = exact.feed(tokens, slots[:4], positions[:4], rows, exact.ring)
        assert torch.equal(y[: len(tokens)], expected) and y.isfinite().all()
        for pool, reference in zip(found.pools, exact.pools, strict=True):
            assert torch.equal(pool[:6], reference[:6])
        at = [start + min(count, 1) + more for start, count, more in zip(at, fed, accepted, strict=True)]
        replays = accepted


def numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=CUDA)
