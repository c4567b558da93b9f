"""The simulation's own parts: its oracle, the rules of its device, its checks, its trace."""

from functools import partial

import pytest

from baton.actors.forward.device import Work, WorkCheckpoint, WorkChunk, WorkMask
from baton.actors.messages import Acquire, DiskReport, Loaded, Ran, Submit, Written
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack, unpack
from baton.models.hash_definition import expected_output
from tests.simulation.disk import SimulatedDisk
from tests.simulation.driver import Simulation
from tests.simulation.hash_device import DeviceError, HashDevice
from tests.simulation.hash_oracle import VOCABULARY, oracle
from tests.simulation.toy_grammar import ToyGrammar, may_draw, pack_mask, unpack_mask
from tests.simulation.trace import line

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("paged", [True, False])
def test_greedy_output_is_the_hash_family_s(paged: bool) -> None:
    tokens = [3, 1, 4, 1, 5]
    assert oracle(tokens, 9, GREEDY, paged) == expected_output(tokens, 9, VOCABULARY, page_fold=paged)


def test_a_sample_depends_on_seed_and_position() -> None:
    """A different seed draws different tokens. A continuation draws the same tokens as one run over the whole."""
    sampling = Sampling(seed=3)
    whole = oracle([3, 1, 4], 9, sampling, True)
    assert whole == whole[:4] + oracle([3, 1, 4, *whole[:4]], 5, sampling, True)
    assert whole != oracle([3, 1, 4], 9, Sampling(seed=4), True)


def test_a_mask_is_packed_and_unpacked() -> None:
    assert unpack_mask(pack_mask([0, 31, 32, 60])) == [0, 31, 32, 60] and len(pack_mask([])) == 8


def test_a_grammar_decides_what_is_drawn() -> None:
    """The grammar allows each token after the tokens before it, and the output ends where the grammar ends."""
    grammar, stops = ToyGrammar(7, 5, 3), Stops(20)
    output = oracle([3, 1, 4], 20, GREEDY, True, partial(may_draw, grammar, stops=stops))
    assert len(output) == 5 and output != oracle([3, 1, 4], 5, GREEDY, True)
    assert all(token in grammar.allowed(output[:at]) for at, token in enumerate(output))


@pytest.mark.parametrize(("words", "message"), [([], "not both"), ([WorkMask(0, pack_mask([5]))], "")])
def test_a_row_with_a_grammar_draws_by_its_mask(words: list[WorkMask], message: str) -> None:
    device = Device(ToyGrammar(7, 5, 3).to_text())
    device.run(Work(1, [WorkChunk(0, 0, 5, True)], [], [], [], words))
    if message:
        with pytest.raises(DeviceError, match=message):
            device.drain()
    else:
        device.drain()
        assert unpack(device.ran[0].tokens) == [5]


class Device(HashDevice):
    """A device with four slots, eight pages of two positions, and one opened row of five tokens."""

    def __init__(self, grammar: str = "") -> None:
        self.ran: list[Ran] = []
        super().__init__(4, 8, 2, self.ran.append)
        self.clear(0)
        request = Request("r", pack([3, 1, 4, 1, 5]), 5, GREEDY, Stops(4), grammar=grammar)
        self.open_row(0, 1, 0, request, [0, 1, 2])


def test_a_step_has_no_effect_before_it_is_executed() -> None:
    device = Device()
    device.run(Work(1, [WorkChunk(0, 0, 5, True)], [], [], []))
    assert device.passed == 0 and not device.ran
    device.drain()
    assert device.passed == 1 and unpack(device.ran[0].tokens) == oracle([3, 1, 4, 1, 5], 1, GREEDY, True)


def test_freeing_a_slot_or_page_in_use_is_an_error() -> None:
    device = Device()
    device.run(Work(1, [WorkChunk(0, 0, 2, False)], [], [], [WorkCheckpoint(0, 2, 3)]))
    for slot in (0, 3):
        with pytest.raises(DeviceError, match="in flight"):
            device.scribble_slot(slot)
    with pytest.raises(DeviceError, match="in flight"):
        device.scribble_page(1)
    device.drain()
    device.scribble_slot(3)
    device.scribble_page(1)


def test_writing_what_the_tree_names_is_an_error() -> None:
    device = Device()
    device.drain()
    device.guarded_slots.add(2)
    device.guarded_entries[2 * 2] = 1
    device.clear(2)
    with pytest.raises(DeviceError, match="keeps"):
        device.execute()
    device.copy_page(0, 2)
    with pytest.raises(DeviceError, match="names"):
        device.execute()


def test_a_checkpoint_that_is_not_crossed_is_an_error() -> None:
    device = Device()
    device.drain()
    device.run(Work(1, [WorkChunk(0, 0, 2, False)], [], [], [WorkCheckpoint(0, 3, 3)]))
    with pytest.raises(DeviceError, match="does not cross"):
        device.execute()


def device_with_a_copy() -> Device:
    """Return a device whose row was fed three tokens and then copied to host memory under key 7."""
    device = Device()
    device.run(Work(1, [WorkChunk(0, 0, 3, False)], [], [], []))
    device.export(7, 0, [0, 1], 3)
    return device


def test_a_copy_is_made_in_stream_order_and_comes_back_whole() -> None:
    device = device_with_a_copy()
    assert 7 in device.exporting and not device.vault
    device.fill(1, 7, 2, [6], 1)
    device.drop(7)
    device.drain()
    assert device.states[2] == device.states[0] and device.entries[12] == device.entries[2] and not device.vault


def test_a_copy_of_what_was_freed_is_an_error() -> None:
    device = Device()
    device.drain()
    device.scribble_slot(0)
    device.export(7, 0, [0, 1], 3)
    with pytest.raises(DeviceError, match="freed or never written"):
        device.drain()


@pytest.mark.parametrize(("pages", "first"), [([6], 0), ([], 1)])
def test_a_copy_that_does_not_fit_is_an_error(pages: list[int], first: int) -> None:
    device = device_with_a_copy()
    device.fill(1, 7, 2, pages, first)
    with pytest.raises(DeviceError, match="does not fit"):
        device.drain()


def test_a_copy_that_was_dropped_is_an_error() -> None:
    device = device_with_a_copy()
    device.drop(7)
    device.fill(1, 7, 2, [5, 6], 0)
    with pytest.raises(DeviceError, match="no copy 7"):
        device.drain()


class Disk(SimulatedDisk):
    """A disk over a device with copy 7. A file takes one byte a token."""

    def __init__(self) -> None:
        self.device = device_with_a_copy()
        self.reports: list[DiskReport] = []
        super().__init__(self.device, lambda position: position, self.reports.append)

    def drain(self) -> None:
        self.device.drain()
        while self.calls:
            self.execute()


FED = pack([3, 1, 4])


def test_a_file_is_written_when_the_copy_is_there_and_read_back() -> None:
    disk = Disk()
    disk.write(7, "", FED)
    assert disk.due is None
    disk.device.drain()
    assert disk.due is not None
    disk.read(8, "", FED)
    disk.drain()
    assert disk.reports == [Written(7), Loaded(8)] and disk.bytes == 3
    assert disk.device.vault[8] == disk.device.vault[7]


def test_a_damaged_file_is_reported_and_deleted() -> None:
    disk = Disk()
    disk.damaged_files = {1}
    disk.write(7, "", FED)
    disk.read(8, "", FED)
    disk.drain()
    assert disk.reports == [Written(7), Loaded(8, "injected: the checksum differs")]
    assert not disk.stored and 8 not in disk.device.vault


@pytest.mark.parametrize("calls", [0, 1])
def test_a_kill_leaves_whole_files_only(calls: int) -> None:
    disk = Disk()
    disk.write(7, "", FED)
    disk.device.drain()
    disk.reset(calls)
    assert len(disk.stored) == calls and not disk.reports and not disk.calls


def test_a_file_of_other_tokens_is_an_error() -> None:
    disk = Disk()
    disk.write(7, "", pack([3, 1, 5]))
    with pytest.raises(AssertionError, match="right is"):
        disk.drain()


def test_a_seed_is_drained_and_checked_to_the_end() -> None:
    simulation = Simulation(3)
    simulation.run()
    simulation.client.exchanges[0].answers = 2
    with pytest.raises(AssertionError, match="answered 2 times"):
        from tests.simulation.checks import check_end

        check_end(simulation)


def test_trace_lines_are_short() -> None:
    request = Request("r7", pack(range(30)), 28, GREEDY, Stops(4))
    assert line(12.0, "api", "scheduler", Submit(request)) == (
        "     12        api → scheduler  Submit(r7 ⟨0 1 2 3 4 5 … 30⟩, 2 of them output)"
    )
    assert line(3.0, "scheduler", "cache", Acquire(4, pack([1, 2]), 1, "", None)).endswith(
        "Acquire(grant=4, tokens=⟨1 2⟩, limit=1)"
    )
