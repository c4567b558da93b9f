"""The choice of a kernel's configuration."""

import torch

from baton.kernels.runtime.triton import KernelConfig, chosen, config_of
from baton.kernels.runtime.triton.configs import table_of

CPU = torch.device("cpu")
SMALL, LARGE = KernelConfig({"BLOCK": 64}), KernelConfig({"BLOCK": 128}, 8)


def test_the_first_is_the_default() -> None:
    assert config_of("state_pool.move", "words=3", CPU, SMALL, LARGE) is SMALL


def test_a_chooser_decides_while_it_is_set() -> None:
    with chosen(lambda kernel, shape, candidates: candidates[(kernel, shape) == ("state_pool.move", "words=3")]):
        assert config_of("state_pool.move", "words=3", CPU, SMALL, LARGE) is LARGE
        assert config_of("state_pool.move", "words=4", CPU, SMALL, LARGE) is SMALL
    assert config_of("state_pool.move", "words=3", CPU, SMALL, LARGE) is SMALL


def test_the_table_is_read() -> None:
    text = '{"NVIDIA H200": {"state_pool.move": {"words=3": {"blocks": {"BLOCK": 128}, "warps": 8, "stages": 2}}}}'
    assert table_of(text) == {("NVIDIA H200", "state_pool.move", "words=3"): LARGE}


def test_larger_warps_keep_the_number_of_threads() -> None:
    assert [KernelConfig({}, warps).warps_of(32) for warps in (1, 4, 8)] == [1, 4, 8]
    assert [KernelConfig({}, warps).warps_of(64) for warps in (1, 4, 8)] == [1, 2, 4]
