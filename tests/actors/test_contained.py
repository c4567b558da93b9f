"""Contained device errors: an error outside of a step fails only the row or the copy that the call was for."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic

import pytest
from msgspec.structs import replace

from baton.actors.forward.contained import ContainedDevice
from baton.actors.forward.device import Work, WorkCheckpoint, WorkChunk, WorkDraft, WorkMask, WorkPrediction
from baton.actors.forward.launching import Done, Pending, Report
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request, Stops
from tests.actors.ring import GREEDY, running
from tests.actors.test_failures import TIGHT, check_all, hash_model, submit_all

REQUEST = Request("a", b"", 0, GREEDY, Stops(1))


class Fault(Exception):
    pass


class Lost(Exception):
    """An error after which the device is not usable."""


class FaultyDevice:
    """A device that records the steps it runs; the calls named in `faults` raise once each."""

    def __init__(self) -> None:
        self.faults: dict[str, Exception] = {}
        self.ran: list[int] = []
        self.work: Work | None = None  # of the latest step

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            if name in self.faults:
                raise self.faults.pop(name)

        return call

    def launch(self, work: Work) -> Pending[Ran]:
        self.ran.append(work.step)
        self.work = work
        return self._enqueued("launch", Ran(work.step, b"", [], []))

    def export(self, key: int, slot: int, pages: list[int], position: int) -> Pending[Transferred]:
        return self._enqueued("export", Transferred(key))

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> Pending[Transferred]:
        return self._enqueued("fill", Transferred(key, grant))

    def _enqueued(self, name: str, report: Report) -> Pending[Report]:
        if name in self.faults:
            raise self.faults.pop(name)
        return Collected(report, self.faults.pop("collect", None))


@dataclass
class Collected(Generic[Report]):
    report: Report
    fault: Exception | None

    def passed(self) -> bool:
        return True

    def collect(self) -> Done[Report]:
        if self.fault:
            raise self.fault
        return Done(self.report, 0.5)


class Seam:
    def __init__(self) -> None:
        self.inner = FaultyDevice()
        self.reports: list[Ran] = []
        self.device = ContainedDevice(self.inner, lambda error: not isinstance(error, Lost))  # type: ignore[arg-type]

    def admit(self, row: int) -> None:
        self.device.copy(1, 2)
        self.device.copy_page(3, 4)
        self.device.open_row(row, 10 + row, 2, REQUEST, [])

    def step(self, number: int, *rows: int) -> None:
        work = Work(number, [WorkChunk(rows[0], 0, 1, False)], list(rows[1:]), [5] * len(rows[1:]), [])
        ran = self.device.launch(work).collect().report
        if ran.error or ran.broken:
            self.reports.append(ran)


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
    assert seam.inner.ran == [1, 2, 4], "a step without any sound row is not run"
    error = "Fault: out of memory"
    assert seam.reports == [Ran(2, b"", [], [], broken={11: error}), Ran(3, b"", [], [], error=error)]


def test_what_concerns_a_broken_row_is_left_out_of_a_step() -> None:
    seam = Seam()
    seam.inner.faults["open_row"] = Fault("no")
    for row in (1, 2, 0, 3):
        seam.admit(row)
    seam.inner.faults["extend_row"] = Fault("no")
    seam.device.extend_row(3, [7])
    work = Work(
        5,
        [WorkChunk(row, 0, 4, True) for row in (0, 1)],
        [2, 3],
        [20, 30],
        [WorkCheckpoint(row, 4, 9) for row in range(4)],
        [WorkMask(row, b"mask") for row in range(4)],
        [WorkDraft(row, 0, (5,)) for row in (2, 3)],
        predictions=[WorkPrediction(row, 2) for row in range(4)],
    )
    late = Future[list[WorkMask]]()
    done = seam.device.launch(replace(work, late=late)).collect()
    assert done.report.broken == {11: "Fault: no", 13: "Fault: no"} and not done.report.error
    assert done.seconds == 0, "not the time of a step with these rows"
    late.set_result([WorkMask(row, b"late") for row in range(4)])
    assert seam.inner.work is not None and seam.inner.work.late is not None
    assert seam.inner.work.late.result(timeout=0) == [WorkMask(row, b"late") for row in (0, 2)]
    assert replace(seam.inner.work, late=None) == Work(
        5,
        [WorkChunk(0, 0, 4, True)],
        [2],
        [20],
        [WorkCheckpoint(row, 4, 9) for row in (0, 2)],
        [WorkMask(row, b"mask") for row in (0, 2)],
        [WorkDraft(2, 0, (5,))],
        predictions=[WorkPrediction(row, 2) for row in (0, 2)],
    )


def test_an_error_of_preparing_is_left_to_the_launch() -> None:
    seam = Seam()
    seam.admit(0)
    work = Work(1, [WorkChunk(0, 0, 1, False)], [], [], [])
    seam.inner.faults["prepare"] = Fault("out of memory")
    seam.device.prepare(work)
    assert seam.device.launch(work).collect().report.error == "" and seam.inner.ran == [1]
    seam.inner.faults["prepare"] = Lost()
    with pytest.raises(Lost):
        seam.device.prepare(work)


def test_a_row_that_is_opened_again_is_sound() -> None:
    seam = Seam()
    seam.inner.faults["open_row"] = Fault("no")
    seam.admit(1)
    seam.admit(1)
    seam.step(1, 1)
    assert (seam.inner.ran, seam.reports) == ([1], [])


def test_drop_all_forgets_errors_of_rows_not_yet_opened() -> None:
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


@pytest.mark.parametrize("call", ["launch", "collect"])
def test_a_step_that_raises_is_reported_and_the_next_one_runs(call: str) -> None:
    seam = Seam()
    seam.inner.faults[call] = Fault("no")
    seam.step(1, 0)
    seam.step(2, 0)
    assert (seam.inner.ran, seam.reports) == ([1, 2], [Ran(1, b"", [], [], error="Fault: no")])


@pytest.mark.parametrize("when", ["call", "collect"])
def test_a_copy_that_could_not_be_made_or_read_is_reported(when: str) -> None:
    seam = Seam()
    seam.inner.faults["export" if when == "call" else when] = Fault("no")
    assert seam.device.export(5, 0, [], 3).collect().report == Transferred(5, None, "Fault: no")
    seam.inner.faults["fill" if when == "call" else when] = Fault("no")
    assert seam.device.fill(9, 5, 0, [], 0).collect().report == Transferred(5, 9, "Fault: no")
    seam.admit(1)
    seam.step(1, 1)
    assert (seam.inner.ran, seam.reports) == ([1], []), "whose state it was to be forward knows"


@pytest.mark.parametrize("call", ["copy", "open_row", "extend_row", "launch", "collect", "export", "fill"])
def test_the_error_of_a_lost_device_is_raised(call: str) -> None:
    seam = Seam()
    seam.admit(0)
    seam.inner.faults[call] = Lost()
    with pytest.raises(Lost):
        seam.admit(1)
        seam.device.extend_row(0, [1])
        seam.step(1, 0)
        seam.device.export(1, 0, [], 1)
        seam.device.fill(9, 1, 0, [], 0)


class FailsAt:
    """A device whose method `call` raises an error when it is called for the `at`-th time."""

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
def test_every_answer_is_right_although_a_device_call_fails(call: str) -> None:
    devices: list[FailsAt] = []

    def wrap(device: Any) -> Any:
        devices.append(FailsAt(device, call, 2))
        return devices[-1]

    async def scenario() -> None:
        async with running(hash_model(), **TIGHT | {"slots": 40}, wrap=wrap) as ring:
            for _ in range(2):
                await check_all(submit_all(ring, 8, 6))
            assert devices[0].calls >= 2
            assert ring.relay.ended_rows() == 2 * 6 + 1, "no other row has lost its state"

    asyncio.run(scenario())
