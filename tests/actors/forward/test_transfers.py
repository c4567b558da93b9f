"""Copies between the pools and host memory on their own stream: correct at any delay, and every wait is needed."""

from collections.abc import Sequence

import pytest
import torch

from baton.actors.forward.contained import ContainedDevice
from baton.actors.forward.device import Work, WorkChunk
from baton.actors.forward.streams import CpuStream
from baton.actors.forward.torch_device import TorchDevice, survives
from baton.actors.forward.transfers import enqueue
from baton.actors.forward.transfers.enqueue import Transfers
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request, Stops
from baton.actors.storage.arena import Arena
from baton.actors.storage.host_memory import HostStates
from baton.actors.storage.lines import HostLines
from baton.actors.tokens import pack
from baton.models.batch import Pools, TensorSpec, stretches
from tests.actors.forward.story import GREEDY, VOCABULARY, model_of, pools_of
from tests.late import Fault, LateDevice
from tests.late.streams import LateStream

META, CPU = torch.device("meta"), torch.device("cpu")
PAGE, PAGE_BYTES = 2, 128
ALL = {"export", "fill", "stream"}


class Bench:
    """A pool of slots of 24 bytes and pages of two tensors, and the Transfers under test."""

    def __init__(self, late: LateDevice, lines: int = 0, state: int = 24) -> None:
        """lines: lines of the arena, of a page each, or of more so that a state takes at most three; 0: no arena"""
        specs = [TensorSpec((PAGE, 4), torch.float32), TensorSpec((PAGE, 3), torch.bfloat16)]
        with late.setup():
            slots, states = stretches(4, [TensorSpec((state,), torch.uint8)], META)
            blocks, pages = stretches(6, specs, META)
            pages_a_line = max(slots.shape[1] // (2 * PAGE_BYTES), 1)
            cut = HostLines(pages_a_line * PAGE_BYTES, slots.shape[1], PAGE_BYTES)
            self.arena = Arena(cut, [late.pinned(lines * cut.nbytes)]) if lines else None
        self.pools, self.stream = Pools(slots, blocks, states, pages, PAGE), late.stream()
        self.host = HostStates(self.arena)
        self.transfers = Transfers(self.pools, self.host, self.stream)

    def write(self, slot: int, pages: Sequence[int], value: int) -> None:
        """Write as a step would: `value` to the slot, and value + 1, value + 2, ... to the pages."""
        with self.stream.active(), torch.inference_mode():
            self.pools.slots[slot].fill_(value)
            for at, page in enumerate(pages):
                self.pools.blocks[page].fill_(value + 1 + at)

    def contents(self, slot: int, pages: Sequence[int]) -> list[torch.Tensor]:
        """Return what a step would read from the slot and the pages."""
        with self.stream.active(), torch.inference_mode():
            return [self.pools.slots[slot] * 1, *(self.pools.blocks[page] * 1 for page in pages)]


def there_and_back(late: LateDevice, waits: set[str], lines: int = 0) -> list[list[int]]:
    """Copy a state to host memory and back into another slot and other pages; return the distinct values found there.

    waits: which waits to perform; leaving one out must be able to corrupt the result.
    "export" waits for the copy to host memory before its slot is written again, "fill" for the copy back. "stream" is
    what the stream of the copies waits for.
    """
    bench = Bench(late, lines)
    bench.write(1, [4, 2], 7)
    made = bench.transfers.export(5, 1, [4, 2], 3)
    if "export" in waits:
        assert made.collect().report == Transferred(5)
    bench.write(1, [4, 2], 90)
    if "export" not in waits:
        made.collect()
    bench.write(0, [0, 3], 50)
    filled = bench.transfers.fill(10, 5, 0, [0, 3], 0)
    if "fill" in waits:
        assert filled.collect().report == Transferred(5, 10)
    found = [late.read(tensor) for tensor in bench.contents(0, [0, 3])]
    return [tensor.unique().tolist() for tensor in found]


@pytest.mark.parametrize("seed", [None, *range(40)])
def test_a_state_goes_to_host_memory_and_comes_back_however_late(seed: int | None) -> None:
    with LateDevice(seed) as late:
        assert there_and_back(late, ALL) == [[7], [8], [9]]


@pytest.mark.parametrize("seed", [None, *range(40)])
def test_a_state_goes_to_the_lines_of_an_arena_and_comes_back_however_late(seed: int | None) -> None:
    with LateDevice(seed) as late:
        assert there_and_back(late, ALL, lines=3) == [[7], [8], [9]]
        assert sum(len(buffer) > 64 for buffer in late._pinned.values()) == 1, "the arena"


@pytest.mark.parametrize("first_page", [0, 1, 2, 3])
def test_a_copy_in_lines_fills_pages_from_any_page_on(first_page: int) -> None:
    with LateDevice(3) as late:
        bench = Bench(late, lines=6, state=300)
        bench.write(1, [4, 2, 0], 7)
        bench.transfers.export(5, 1, [4, 2, 0], 6).collect()
        copy = bench.host.get(5)
        assert [len(part) for part in (*copy.state, *copy.blocks)] == [128, 128, 64, 1, 1, 1]
        bench.write(3, [1, 3, 5], 50)
        bench.transfers.fill(10, 5, 3, [1, 3, 5][first_page:], first_page).collect()
        found = [late.read(tensor).unique().tolist() for tensor in bench.contents(3, [1, 3, 5])]
        assert found == [[7], *([51 + at] if at < first_page else [8 + at] for at in range(3))]


@pytest.mark.parametrize("in_lines", [False, True])
def test_a_copy_without_its_first_pages_fills_the_pages_after_them(in_lines: bool) -> None:
    with LateDevice(3) as late:
        bench = Bench(late, lines=6 * in_lines, state=300)
        copy = bench.host.room(8, first_page=1)
        for at, part in enumerate(copy.blocks[0].split(1) if not in_lines else copy.blocks):
            part.fill_(20 + at)
        for part in copy.state:
            part.fill_(7)
        bench.host.put(5, copy)
        bench.write(3, [1, 3, 5, 0], 50)
        bench.transfers.fill(10, 5, 3, [5, 0], 2).collect()
        found = [late.read(tensor).unique().tolist() for tensor in bench.contents(3, [1, 3, 5, 0])]
        assert found == [[7], [51], [52], [21], [22]]


def test_copies_lock_no_memory_while_the_device_computes() -> None:
    """A state of more than a mebibyte would be a fault of the late device if its memory were locked for each copy."""
    state = 3 * 2**20
    with LateDevice() as late:
        bench = Bench(late, lines=9, state=state)
        locked = sum(buffer.nbytes for buffer in late._pinned.values())
        for key in range(12):
            bench.transfers.export(key, 1, [4, 2, 0][: key % 4], 2 * (key % 4)).collect()
            bench.transfers.fill(10, key, 0, [1, 3, 5][: key % 4], 0).collect()
            if key >= 2:
                bench.host.drop(key - 2)
        assert sum(buffer.nbytes for buffer in late._pinned.values()) - locked < 4096, "lists of pages"
        assert bench.arena is not None and bench.arena.free_lines == 9 - 3 - 3, (
            "of the last two copies, each of a state and pages"
        )
    with pytest.raises(Fault, match="page lock"), LateDevice() as late:
        Bench(late, state=state).transfers.export(5, 1, [], 0)


def test_pages_are_copied_in_parts_if_they_exceed_the_staging_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "MOST_STAGED", 200)
    with LateDevice(3) as late:
        assert there_and_back(late, ALL) == [[7], [8], [9]]
        assert late.count("download") == late.count("upload") - 4 == 3, "of the state and two pages, and where they lie"


@pytest.mark.parametrize("left_out", sorted(ALL))
def test_a_missing_wait_is_detected(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if left_out == "stream":
        monkeypatch.setattr(LateStream, "wait", lambda self, event: None)
    wrong = 0
    for seed in range(40):
        with LateDevice(seed, raises=False) as late:
            wrong += there_and_back(late, ALL - {left_out}) != [[7], [8], [9]]
    assert wrong > 0


def test_the_stream_of_the_steps_waits_for_no_copy() -> None:
    with LateDevice() as late:
        bench = Bench(late)
        bench.write(1, [4, 2], 7)
        made = bench.transfers.export(5, 1, [4, 2], 3)
        found = bench.contents(1, [4])
        bench.stream.record().wait()
        copies = late.streams[-1]
        assert copies is not bench.stream and not made.passed() and copies.done == 0
        made.collect()
        assert late.read(found[0]).unique().tolist() == [7]


def test_a_copy_is_available_only_when_it_is_complete() -> None:
    with LateDevice() as late:
        bench = Bench(late)
        made = bench.transfers.export(5, 1, [4, 2], 3)
        assert bench.host.wait_for(5, 0) is None
        assert made.collect().seconds > 0
        copy = bench.host.get(5)
        assert copy.position == 3
        assert [part.shape for part in (*copy.state, *copy.blocks)] == [(64,), (2, 128)]
        assert [(kv.dtype, list(kv.shape)) for kv in bench.host.kv_of(copy)] == [
            (torch.float32, [3, 4]), (torch.bfloat16, [3, 3]),
        ]  # fmt: skip


def test_a_copy_that_fails_late_is_recorded_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.AcceleratorError), LateDevice() as late:
        bench = Bench(late)
        with bench.stream.active(), torch.inference_mode():
            torch.ones(1, device=META).index_select(0, torch.empty(1, dtype=torch.int64, device=META))
        made = bench.transfers.export(5, 1, [], 0)
        with pytest.raises(torch.AcceleratorError):
            made.collect()
        with pytest.raises(KeyError, match="could not be made"):
            bench.host.get(5)


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_a_fill_that_fails_half_way_is_over_when_it_has_stopped_writing(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room to stage")

    with LateDevice(seed) as late:
        bench = Bench(late)
        bench.write(1, [4, 2], 7)
        bench.transfers.export(5, 1, [4, 2], 3).collect()
        monkeypatch.setattr(enqueue, "scatter", refuse)
        filled = bench.transfers.fill(10, 5, 0, [0, 3], 0)
        assert seed is not None or not filled.passed()
        with pytest.raises(torch.OutOfMemoryError):
            filled.collect()
        bench.write(0, [], 50)
        assert late.read(bench.contents(0, [])[0]).unique().tolist() == [50]
        monkeypatch.setattr(enqueue, "gather", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            bench.transfers.export(6, 1, [4, 2], 3).collect()
        with pytest.raises(KeyError, match="could not be made"):
            bench.host.get(6)


def test_host_memory_that_cannot_be_locked_fails_one_copy_and_not_the_device() -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        error = torch.AcceleratorError("CUDA error: out of memory")
        error.error_code = 2  # type: ignore[attr-defined]
        raise error

    with LateDevice() as late:
        bench = Bench(late)
        device = ContainedDevice(bench.transfers, survives)  # type: ignore[arg-type]
        usable, bench.host._buffer = bench.host._buffer, refuse
        assert "out of memory" in device.export(5, 1, [4], 2).collect().report.error
        assert "could not be made" in device.fill(10, 5, 0, [0], 0).collect().report.error
        bench.host._buffer = usable
        assert device.export(6, 1, [4], 2).collect().report == Transferred(6)


def test_a_copy_without_host_memory_is_recorded_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with LateDevice() as late:
        bench = Bench(late)
        bench.host.use(bench.pools, refuse)
        with pytest.raises(RuntimeError):
            bench.transfers.export(5, 1, [4], 2)
        with pytest.raises(KeyError, match="could not be made"):
            bench.transfers.fill(10, 5, 0, [0], 0)


def moved_on(device: TorchDevice, slots: tuple[int, int], pages: tuple[list[int], list[int]]) -> list[Ran]:
    """Run a prompt in part, copy it to host memory while another row steps, and continue it in another slot."""
    ids, other, ran = pack((5 * i + 1) % VOCABULARY for i in range(9)), pack([3, 1, 4]), []
    before, after, others = (table if device.pools.pages else [] for table in (*pages, [20, 21]))

    def run(chunks: list[WorkChunk], decodes: dict[int, int]) -> None:
        ran.append(device.launch(Work(len(ran), chunks, list(decodes), list(decodes.values()), [])))

    device.clear(slots[0])
    device.open_row(0, 10, slots[0], Request("r", ids, 9, GREEDY, Stops(9)), before)
    device.clear(7)
    device.open_row(1, 11, 7, Request("o", other, 3, GREEDY, Stops(9)), others)
    run([WorkChunk(0, 0, 7, False), WorkChunk(1, 0, 3, True)], {})
    made = device.export(1, slots[0], before, 7)
    run([], {1: 3})
    made.collect()
    device.poison(slots[0])
    filled = device.fill(12, 1, slots[1], after, 0)
    device.open_row(2, 12, slots[1], Request("r", ids, 9, GREEDY, Stops(9)), after)
    run([], {1: 4})
    filled.collect()
    run([WorkChunk(2, 7, 9, True)], {1: 5})
    run([], {2: 9, 1: 6})
    return [pending.collect().report for pending in ran]


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (None, 1))])
def test_a_row_resumes_from_host_memory_while_another_row_steps(family: str, seed: int | None) -> None:
    places = ((3, 5), ([3, 1, 4], [11, 12, 13]))
    model = model_of(family)
    on_cpu = TorchDevice(model, pools_of(model, CPU), 3, 90, stream=CpuStream())
    assert not on_cpu.copies_aside, "its copies are in order with all else"
    expected = moved_on(on_cpu, *places)
    with LateDevice(seed) as late:
        stream, model = late.stream(), model_of(family)
        late.to(model)
        with late.setup():
            pools = pools_of(model, META)
        device = TorchDevice(model, pools, 3, 90, stream=stream)
        assert device.copies_aside
        device.capture()
        assert [ran.tokens for ran in moved_on(device, *places)] == [ran.tokens for ran in expected]
