"""The arena of host copies for a GPU: locked once, by threads that have entered the device, within --host-memory."""

import mmap
import re
from pathlib import Path

import pytest
import structlog
import torch

from baton.api.config import Config
from baton.api.machine import host_arena
from baton.api.machine.host_arena import MOST_LOCKED_BY_DEFAULT, ArenaStart, host_bytes, lines_of, mapped_arena
from baton.models.batch import TensorSpec, allocate
from tests.actors.forward.story import model_of
from tests.api.machine.fake_cuda import FakeCuda

DEVICE = torch.device("cuda", 1)
SMAPS = Path("/proc/self/smaps")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "CHUNK", 1_000_000)


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
def test_the_arena_is_locked_within_host_memory_before_the_model_serves(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, model, nbytes = FakeCuda().install(monkeypatch), model_of(family), 10_000_000
    start = ArenaStart(nbytes, 16, DEVICE)
    start.begin(model)
    arena = start.finish()
    pools = allocate(model, 1, 1, 16, torch.device("cpu"))
    assert (arena.lines.state_bytes, arena.lines.page_bytes) == (pools.slots.shape[1], pools.blocks.shape[1])
    locked = sorted(cuda.locked)
    assert nbytes - arena.lines.nbytes < sum(end - begin for begin, end in locked) == arena.nbytes <= nbytes
    assert len(locked) > 5 and all(begin % mmap.PAGESIZE == 0 for begin, _ in locked)
    lines = arena.take(arena.nbytes // arena.lines.nbytes)
    assert lines is not None and arena.free_lines == 0
    for line in lines:
        at = line.data_ptr()
        assert any(begin <= at and at + line.nbytes <= end for begin, end in locked), "no line lies across two chunks"
    assert set(cuda.entered.values()) == {DEVICE} and not cuda.not_entered


def test_memory_that_cuda_does_not_lock_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(refuse_after=3).install(monkeypatch)
    start = ArenaStart(10_000_000, 16, DEVICE)
    with structlog.testing.capture_logs() as logged:
        start.begin(model_of("nemotron_h"))
        arena = start.finish()
    assert 2_000_000 < arena.nbytes <= 3_000_000
    assert [(line["log_level"], line["wanted"]) for line in logged] == [("warning", "9.5 MiB")]


def test_without_host_memory_there_is_an_arena_without_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    for nbytes in (0, 64):
        start = ArenaStart(nbytes, 16, DEVICE)
        start.begin(model_of("nemotron_h"))
        arena = start.finish()
        assert (arena.nbytes, arena.take(1), cuda.locked) == (0, None, [])


def test_a_start_that_fails_locks_no_further_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "THREADS", 1)
    cuda = FakeCuda().install(monkeypatch)
    start = ArenaStart(10_000_000, 16, DEVICE)
    with cuda._changing:  # the first chunk waits here
        start.begin(model_of("nemotron_h"))
        start.cancel()
    start._threads.shutdown()
    assert len(cuda.locked) <= 1


def test_the_default_is_an_eighth_of_the_free_memory_and_at_most_64_gib_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_arena, "free_memory", lambda device: 80 * 2**30)
    assert host_bytes(Config(), True) == host_bytes(Config(), False) == 10 * 2**30
    monkeypatch.setattr(host_arena, "free_memory", lambda device: 2**41)
    assert host_bytes(Config(), True) == MOST_LOCKED_BY_DEFAULT < host_bytes(Config(), False) == 2**38
    assert host_bytes(Config(host_memory=2**40), True) == 2**40


def test_the_lines_are_those_of_the_pools() -> None:
    class Odd:
        """A model whose tensors are padded in the pools."""

        def state_specs(self) -> list[TensorSpec]:
            return [TensorSpec((3,), torch.float32), TensorSpec((70,), torch.int8)]

        def kv_specs(self) -> list[TensorSpec]:
            return [TensorSpec((5,), torch.int8)]

    lines = lines_of(Odd(), 3)  # type: ignore[arg-type]
    assert (lines.state_bytes, lines.page_bytes) == (64 + 128, 64)


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux says which memory may have huge pages")
def test_a_cpus_arena_is_mapped_in_huge_pages() -> None:
    arena = mapped_arena(model_of("mamba2"), 10_000_000, 16)
    lines = arena.take(1)
    assert lines is not None
    at, flags = lines[0].data_ptr(), ""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        begin, end = (int(bound, 16) for bound in mapping.split(" ", 1)[0].split("-"))
        if begin <= at < end:
            flags = mapping.partition("VmFlags:")[2]
    assert "hg" in flags.split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()
