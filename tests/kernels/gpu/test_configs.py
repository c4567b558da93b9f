"""The choice of a kernel's configuration."""

import pytest
import torch

from baton.kernels.attention.paged.tiles import prefill_candidates
from baton.kernels.runtime.triton import KernelConfig, by_shape, chosen, config_of, limits
from baton.kernels.runtime.triton.configs import table_of
from tests.kernels.gpu.compiling import SHARED

CPU = torch.device("cpu")
SMALL, LARGE = KernelConfig({"BLOCK": 64}), KernelConfig({"BLOCK": 128}, 8)


def test_the_first_is_the_default() -> None:
    assert config_of("state_pool.move", "words=3", CPU, SMALL, LARGE) is SMALL


def test_a_chooser_decides_while_it_is_set() -> None:
    with chosen(lambda kernel, shape, candidates: candidates[(kernel, shape) == ("state_pool.move", "words=3")]):
        assert config_of("state_pool.move", "words=3", CPU, SMALL, LARGE) is LARGE
        assert config_of("state_pool.move", "words=4", CPU, SMALL, LARGE) is SMALL
    assert config_of("state_pool.move", "words=3", CPU, SMALL, LARGE) is SMALL


def test_a_configuration_is_looked_up_once_a_shape_except_by_a_chooser() -> None:
    looked_up = list[int]()

    @by_shape
    def config(words: int, device: torch.device) -> KernelConfig:
        looked_up.append(words)
        return config_of("state_pool.move", f"words={words}", device, SMALL, LARGE)

    assert [config(words, torch.device("cpu")) for words in (3, 3, 4, 3)] == [SMALL] * 4 and looked_up == [3, 4]
    with chosen(lambda kernel, shape, candidates: candidates[1]):
        assert [config(3, CPU), config(3, CPU)] == [LARGE] * 2
    assert config(3, CPU) is SMALL and looked_up == [3, 4, 3, 3]


def test_the_table_is_read() -> None:
    text = '{"NVIDIA H200": {"state_pool.move": {"words=3": {"blocks": {"BLOCK": 128}, "warps": 8, "stages": 2}}}}'
    assert table_of(text) == {("NVIDIA H200", "state_pool.move", "words=3"): LARGE}


def test_larger_warps_keep_the_number_of_threads() -> None:
    assert [KernelConfig({}, warps).warps_of(32) for warps in (1, 4, 8)] == [1, 4, 8]
    assert [KernelConfig({}, warps).warps_of(64) for warps in (1, 4, 8)] == [1, 2, 4]


def test_shared_memory_of_a_gpu_is_what_its_kernels_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for index, target in enumerate(target for target in SHARED if target.isdigit()):
        capability = int(target) // 10, int(target) % 10
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, capability=capability: capability)
        limits._of_gpu.cache_clear()
        assert limits.shared_memory(torch.device("cuda", index)) == SHARED[target] * limits.KIB
    limits._of_gpu.cache_clear()


def test_tiles_of_attention_are_larger_where_tensor_cores_read_shared_memory() -> None:
    def default(width: int, target: str) -> tuple[int, ...]:
        config = prefill_candidates(4, width, torch.bfloat16, SHARED[target] * limits.KIB)[0]
        return (*config.blocks.values(), config.warps, config.stages)

    assert {default(128, target) for target in ("90", "100")} == {(128, 64, 8, 3)}
    assert {default(128, target) for target in ("80", "89", "gfx942")} == {(128, 32, 8, 3)}
    assert default(256, "90") == (128, 32, 8, 2) and default(256, "80") == (64, 32, 8, 2)


def test_another_device_has_what_is_assumed() -> None:
    meta = torch.device("meta")
    with limits.assumed(227 * limits.KIB):
        assert limits.shared_memory(meta) == 227 * limits.KIB
    assert limits.shared_memory(meta) == limits.LEAST
