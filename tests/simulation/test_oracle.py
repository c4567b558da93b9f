"""The parts of the simulation itself: its oracle, its device's rules, its checks, its trace."""

import pytest

from actors.device import Work, WorkCheckpoint, WorkChunk
from actors.messages import Acquire, Ran, Request, Sampling, Stops, Submit
from actors.tokens import pack, unpack
from models.hash_definition import expected_output
from tests.simulation.driver import Simulation
from tests.simulation.hash_device import VOCABULARY, DeviceError, HashDevice, oracle
from tests.simulation.trace import line

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("paged", [True, False])
def test_greedy_is_the_family_s_own_output(paged: bool) -> None:
    tokens = [3, 1, 4, 1, 5]
    assert oracle(tokens, 9, GREEDY, paged) == expected_output(tokens, 9, VOCABULARY, page_fold=paged)


def test_a_seed_draws_by_position() -> None:
    """Another seed draws otherwise, and a continuation draws as the whole did."""
    sampling = Sampling(seed=3)
    whole = oracle([3, 1, 4], 9, sampling, True)
    assert whole == whole[:4] + oracle([3, 1, 4, *whole[:4]], 5, sampling, True)
    assert whole != oracle([3, 1, 4], 9, Sampling(seed=4), True)


class Device(HashDevice):
    """Four slots, eight pages of two positions, and one row of five tokens that is ready to be fed."""

    def __init__(self) -> None:
        self.ran: list[Ran] = []
        super().__init__(4, 8, 2, self.ran.append)
        self.clear(0)
        request = Request("r", pack([3, 1, 4, 1, 5]), 5, GREEDY, Stops(4))
        self.open_row(0, 1, 0, request, [0, 1, 2])



def test_nothing_is_there_before_its_time() -> None:
    device = Device()
    device.run(Work(1, [WorkChunk(0, 0, 5, True)], [], [], []))
    assert device.passed == 0 and not device.ran
    device.drain()
    assert device.passed == 1 and unpack(device.ran[0].tokens) == oracle([3, 1, 4, 1, 5], 1, GREEDY, True)


def test_a_slot_freed_under_a_step_is_an_error() -> None:
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


def test_what_the_tree_names_cannot_be_written() -> None:
    device = Device()
    device.drain()
    device.kept.add(2)
    device.guarded[2 * 2] = 1
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


def test_a_seed_is_drained_and_checked_to_the_end() -> None:
    simulation = Simulation(3)
    simulation.run()
    simulation.client.asked[0].answers = 2
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
