"""Decoding with drafts gives each family's bits of decoding one token at a time, in hidden states, states and pages."""

from collections.abc import Iterator

import pytest
import torch

from baton.models.hash import HashModel
from baton.models.loading.checkpoint import random_model
from tests.kernels.installed import installed
from tests.models.drafting import CPU, assert_drafts_change_nothing
from tests.models.oracle import CHECKPOINTS, VOCABULARY, settings_of

everywhere = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def native_kernels() -> Iterator[None]:
    with installed(threads=2):
        yield


@everywhere
@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafts_change_no_bit(name: str, dtype: torch.dtype) -> None:
    assert_drafts_change_nothing(random_model(settings_of(name), dtype, CPU, seed=0))


@everywhere
@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "nemotron_h-moe"])
def test_nor_do_they_in_what_a_head_for_predictions_keeps(name: str, dtype: torch.dtype) -> None:
    assert_drafts_change_nothing(random_model(settings_of(name), dtype, CPU, seed=2, with_head=True), 2)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing_hybrid"])
def test_states_in_bfloat16_are_rounded_alike(name: str) -> None:
    assert_drafts_change_nothing(random_model(settings_of(name), torch.bfloat16, CPU, 1, torch.bfloat16), 1)


@pytest.mark.parametrize("page_fold", [False, True])
def test_so_does_the_hash_model(page_fold: bool) -> None:
    model = HashModel(VOCABULARY, 4, 64, page_fold)
    for seed in range(20):
        assert_drafts_change_nothing(model, seed)
