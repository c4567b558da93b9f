"""The oracle itself: a planted bug must show."""

from collections.abc import Callable

import pytest

from actors.lease import Lease
from actors.result_processor import Record, ResultProcessor
from tests.simulation.driver import Simulation
from tests.simulation.hash_device import HashDevice


def found(seeds: int) -> bool:
    for seed in range(seeds):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except AssertionError:
            simulation.ledger.close()
            return True
    return False


def test_a_slot_that_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashDevice, "clear", lambda self, slot: None)
    assert found(20)


def test_a_page_that_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashDevice, "copy_page", lambda self, source, target: None)
    assert found(50)


def test_a_state_that_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashDevice, "copy", lambda self, source, target: self.clear(target))
    assert found(50)


def test_a_donation_one_token_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    donate: Callable[[ResultProcessor, Record, Lease, int, bool], None] = ResultProcessor._donate

    def ahead(self: ResultProcessor, record: Record, state: Lease, position: int, closes: bool) -> None:
        donate(self, record, state, min(position + 1, len(record.history)), closes)

    monkeypatch.setattr(ResultProcessor, "_donate", ahead)
    assert found(20)
