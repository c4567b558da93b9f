"""The seam to the device: what raises outside of a step fails the row, or the copy, that it was for, and only that."""

import asyncio
from typing import Any

import pytest

from actors.forward.contained import ContainedDevice
from actors.forward.device import Work, WorkChunk
from actors.messages import Ran, Unmade
from actors.requests import Request, Stops
from tests.actors.ring import GREEDY, running
from tests.actors.test_failures import TIGHT, check_all, hash_model, submit_all

REQUEST = Request("a", b"", 0, GREEDY, Stops(1))


class Fault(Exception):
    pass


class Lost(Exception):
    """What no device goes on after."""


class FaultyDevice:
    """Notes what it is asked for; the calls named in `faults` raise."""

    def __init__(self) -> None:
        self.faults: dict[str, Exception] = {}
        self.ran: list[int] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            if name in self.faults:
                raise self.faults.pop(name)

        return call

    def run(self, work: Work) -> None:
        self.ran.append(work.step)
        if "run" in self.faults:
            raise self.faults.pop("run")


class Seam:
    def __init__(self) -> None:
        self.inner = FaultyDevice()
        self.reports: list[Ran | Unmade] = []
        self.device = ContainedDevice(self.inner, self.reports.append, lambda error: not isinstance(error, Lost))

    def admit(self, row: int) -> None:
        self.device.copy(1, 2)
        self.device.copy_page(3, 4)
        self.device.open_row(row, 10 + row, 2, REQUEST, [])

    def step(self, number: int, *rows: int) -> None:
        self.device.run(Work(number, [WorkChunk(rows[0], 0, 1, False)], list(rows[1:]), [5] * len(rows[1:]), []))


@pytest.mark.parametrize("call", ["copy", "copy_page", "open_row"])
def test_a_row_that_could_not_be_set_up_fails_in_its_step_and_no_other_row_does(call: str) -> None:
    seam = Seam()
    seam.admit(0)
    seam.inner.faults[call] = Fault("out of memory")
    seam.admit(1)
    seam.step(1, 0)
    seam.step(2, 0, 1)
    seam.step(3, 1)
    seam.step(4, 0)
    assert seam.inner.ran == [1, 4]
    assert seam.reports == [Ran(step, b"", [], [], error="Fault: out of memory") for step in (2, 3)]


def test_a_row_that_is_opened_anew_is_sound_again() -> None:
    seam = Seam()
    seam.inner.faults["open_row"] = Fault("no")
    seam.admit(1)
    seam.admit(1)
    seam.step(1, 1)
    assert (seam.inner.ran, seam.reports) == ([1], [])


def test_nothing_is_held_against_the_rows_of_a_new_unit() -> None:
    seam = Seam()
    seam.inner.faults["copy"] = Fault("no")
    seam.device.copy(1, 2)
    seam.device.drop_all()
    seam.admit(1)
    seam.step(1, 1)
    assert (seam.inner.ran, seam.reports) == ([1], [])


def test_a_row_that_could_not_be_extended_fails() -> None:
    seam = Seam()
    seam.admit(0)
    seam.inner.faults["extend_row"] = Fault("no")
    seam.device.extend_row(0, [7])
    seam.step(1, 0)
    assert seam.reports == [Ran(1, b"", [], [], error="Fault: no")]


def test_a_step_that_raises_is_reported_and_the_next_one_runs() -> None:
    seam = Seam()
    seam.inner.faults["run"] = Fault("no")
    seam.step(1, 0)
    seam.step(2, 0)
    assert (seam.inner.ran, seam.reports) == ([1, 2], [Ran(1, b"", [], [], error="Fault: no")])


def test_a_copy_that_could_not_be_made_is_told() -> None:
    seam = Seam()
    seam.inner.faults["export"] = Fault("no")
    seam.device.export(5, 0, [], 3)
    assert seam.reports == [Unmade(5, "Fault: no")]


@pytest.mark.parametrize("call", ["copy", "open_row", "extend_row", "run", "export"])
def test_a_device_that_is_lost_is_not_held_up(call: str) -> None:
    seam = Seam()
    seam.admit(0)
    seam.inner.faults[call] = Lost()
    with pytest.raises(Lost):
        seam.admit(1)
        seam.device.extend_row(0, [1])
        seam.step(1, 0)
        seam.device.export(1, 0, [], 1)


class FailsAt:
    """A device of which the n-th call of one kind raises."""

    def __init__(self, device: Any, call: str, at: int) -> None:
        self._device, self._call, self._at = device, call, at
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name) if name != self._call else self._sometimes

    def _sometimes(self, *arguments: Any) -> None:
        self.calls += 1
        if self.calls == self._at:
            raise Fault("out of memory")
        getattr(self._device, self._call)(*arguments)


@pytest.mark.parametrize("call", ["clear", "copy", "open_row", "extend_row"])
def test_every_answer_is_right_though_a_call_on_the_device_fails(call: str) -> None:
    devices: list[FailsAt] = []

    def wrap(device: Any) -> Any:
        devices.append(FailsAt(device, call, 2))
        return devices[-1]

    async def scenario() -> None:
        async with running(hash_model(), **TIGHT | {"slots": 40}, wrap=wrap) as ring:
            for _ in range(2):
                await check_all(submit_all(ring, 8, 6))
            assert devices[0].calls >= 2

    asyncio.run(scenario())
