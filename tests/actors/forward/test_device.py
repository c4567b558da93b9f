"""The device's thread: it makes every call in order, and none after a call that raised."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from baton.actors.forward.device import Work, WorkCommit, WorkMask
from baton.actors.forward.launching import Done
from baton.actors.forward.threads import DeviceThread
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request, Sampling, Stops


def ran(step: int) -> Ran:
    return Ran(step, b"", [], [])


class NotedCalls:
    """A device that records its calls, and whose `launch` raises for step 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._note(name, *arguments)

    def _note(self, name: str, *arguments: Any) -> Done[Any] | None:
        self.calls.append((name, *arguments))
        self.threads.add(threading.current_thread().name)
        if name in ("export", "fill"):
            return Done(Transferred(arguments[name == "fill"]), 0.0)
        if name != "launch":
            return None
        if arguments[0].step == 0:
            raise RuntimeError("the device is gone")
        return Done(ran(arguments[0].step), 0.0)


def test_every_call_is_made_in_order_on_the_thread() -> None:
    device, delivered, failed = NotedCalls(), list[Any](), list[BaseException]()
    thread = DeviceThread(device, delivered.append, failed.append)  # type: ignore[arg-type]
    request = Request("r", b"", 0, Sampling(), Stops(1))
    work = Work(1, [], [], [], [])
    expected = [
        ("clear", 1),
        ("poison", 2),
        ("copy", 3, 4),
        ("copy_page", 5, 6),
        ("export", 7, 8, [9], 10),
        ("fill", 10, 11, 12, [13], 14),
        ("drop", 15),
        ("drop_all",),
        ("open_row", 16, 17, 18, request, [19]),
        ("extend_row", 20, [21]),
        ("launch", work),
    ]
    for name, *arguments in expected:
        getattr(thread, "run" if name == "launch" else name)(*arguments)
    thread.close()
    assert device.calls == [("enter_thread",), *expected] and not failed and device.threads == {"device"}
    assert delivered == [Transferred(7), Transferred(11), ran(1)]


def test_no_call_is_made_after_one_that_raises() -> None:
    device, delivered, failed = NotedCalls(), list[Any](), list[BaseException]()
    thread = DeviceThread(device, delivered.append, failed.append)  # type: ignore[arg-type]
    thread.run(Work(0, [], [], [], []))
    thread.clear(1)
    thread.close()
    assert [name for name, *_ in device.calls] == ["enter_thread", "launch"]
    assert [str(error) for error in failed] == ["the device is gone"]


def test_closing_ends_a_step_whose_late_masks_never_come() -> None:
    """So that the actors can be restarted after one of them has failed."""
    device, delivered = MaskedCalls(), list[Any]()
    thread = DeviceThread(device, delivered.append, delivered.append)  # type: ignore[arg-type]
    come, missing = Future[list[WorkMask]](), Future[list[WorkMask]]()
    thread.run(Work(1, [], [], [], [], late=come))
    come.set_result([WorkMask(0, b"word")])
    thread.run(Work(2, [], [], [], [], late=missing))
    thread.run(Work(0, [], [], [], [], commits=[WorkCommit(1, 2, 3)]))  # accepted drafts of a row that has retired
    thread.close()
    assert device.masks == [[WorkMask(0, b"word")], []] and delivered == [ran(1), ran(2), ran(0)]


class MaskedCalls(NotedCalls):
    """A device whose steps wait for their late masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[list[WorkMask]] = []

    def launch(self, work: Work) -> Done[Any] | None:
        if work.late is not None:
            self.masks.append(work.late.result())
        return Done(ran(work.step), 0.0)


def test_a_held_result_is_delivered_before_a_failure() -> None:
    """The failure of a row's extension, which follows a step without delivering its result."""

    class FailingCalls(SteppedCalls):
        def extend_row(self, row: int, pages: list[int]) -> None:
            raise RuntimeError("no more pages")

    device, seen = FailingCalls(), list[Any]()
    thread = DeviceThread(device, seen.append, seen.append)  # type: ignore[arg-type]
    thread.run(Work(1, [], [], [], []))
    assert device.computing.acquire(timeout=10)
    thread.extend_row(0, [3])
    device.may_end.release()
    thread.close()
    assert [str(each) for each in seen] == [str(ran(1)), "no more pages"]


class SteppedCalls(NotedCalls):
    """A device whose steps wait in `launch` until the test lets them end, as a CPU's do while they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.computing, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def launch(self, work: Work) -> Done[Any] | None:
        self.computing.release()
        assert self.may_end.acquire(timeout=10)
        return self._note("launch", work)


def test_the_next_step_is_prepared_before_a_result_is_delivered_and_launched_after() -> None:
    device, failed = SteppedCalls(), list[BaseException]()
    thread = DeviceThread(device, lambda report: device.calls.append(report), failed.append)  # type: ignore[arg-type]
    steps = [Work(number, [], [], [], []) for number in (1, 2, 3)]
    thread.run(steps[0])
    assert device.computing.acquire(timeout=10)
    thread.extend_row(0, [3])  # enqueued while the first is computed
    thread.run(steps[1])
    device.may_end.release()
    assert device.computing.acquire(timeout=10)
    device.may_end.release()
    wait_for(lambda: device.calls[-1] == ran(2))  # nothing is enqueued, so the result does not wait
    thread.run(steps[2])
    device.may_end.release()
    thread.close()
    before = [("launch", steps[0]), ("extend_row", 0, [3]), ("prepare", steps[1])]
    expected = [*before, ran(1), ("launch", steps[1]), ran(2)]
    assert device.calls[1:] == [*expected, ("launch", steps[2]), ran(3)] and not failed


class Late:
    """A step that completes when the test sets `over`. `threads` are the names of the threads that collected it."""

    def __init__(self, step: int, error: Exception | None = None) -> None:
        self.step, self.error = step, error
        self.over = threading.Event()
        self.threads: list[str] = []

    def passed(self) -> bool:
        return self.over.is_set()

    def collect(self) -> Done[Ran]:
        assert self.over.wait(10)
        self.threads.append(threading.current_thread().name)
        if self.error:
            raise self.error
        return Done(ran(self.step), 0.0)


class LateDevice:
    copies_aside = True

    def __init__(self, steps: list[Late], copies: Sequence[Late] = ()) -> None:
        self.steps, self.copies = steps, copies
        self.cleared = threading.Event()
        self.entered: list[str] = []  # the threads that may use the device, in order

    def enter_thread(self) -> None:
        self.entered.append(threading.current_thread().name)

    def prepare(self, work: Work) -> None:
        pass

    def launch(self, work: Work) -> Late:
        return self.steps[work.step]

    def export(self, key: int, *more: Any) -> Late:
        return self.copies[key]

    def fill(self, grant: int, key: int, *more: Any) -> Late:
        return self.copies[key]

    def clear(self, slot: int) -> None:
        self.cleared.set()


def run_steps(steps: list[Late]) -> tuple[LateDevice, DeviceThread, list[Any], list[BaseException]]:
    """Enqueue the steps and then the clearing of a slot, and wait until the slot is cleared."""
    device, delivered, failed = LateDevice(steps), list[Any](), list[BaseException]()
    thread = DeviceThread(device, delivered.append, failed.append)  # type: ignore[arg-type]
    for number in range(len(steps)):
        thread.run(Work(number, [], [], [], []))
    thread.clear(0)
    assert device.cleared.wait(10)
    return device, thread, delivered, failed


def test_the_thread_that_enqueues_does_not_wait_for_steps_which_are_delivered_in_order() -> None:
    steps = [Late(0), Late(1), Late(2)]
    steps[1].over.set()
    _, thread, delivered, failed = run_steps(steps)
    assert delivered == [], "the second is over, but the first is not"
    for step in steps:
        step.over.set()
    thread.close()
    assert delivered == [ran(0), ran(1), ran(2)] and not failed
    assert [step.threads for step in steps] == [["device-steps"]] * 3


def test_no_step_waits_for_a_copy() -> None:
    steps, copies = [Late(0), Late(1)], [Late(7), Late(8)]
    device, delivered, failed = LateDevice(steps, copies), list[Any](), list[BaseException]()
    thread = DeviceThread(device, delivered.append, failed.append)  # type: ignore[arg-type]
    assert thread.copies_aside
    thread.export(0, 1, [], 2)
    thread.fill(5, 1, 1, [], 0)
    for number in range(2):
        thread.run(Work(number, [], [], [], []))
    thread.clear(0)
    assert device.cleared.wait(10)
    for step in steps:
        step.over.set()
    wait_for(lambda: len(delivered) == 2)
    for copy in reversed(copies):
        copy.over.set()
    thread.close()
    assert delivered == [ran(0), ran(1), ran(7), ran(8)] and not failed
    assert [copy.threads for copy in copies] == [["device-copies"]] * 2


def test_every_thread_enters_the_device_before_it_uses_it() -> None:
    steps, copies = [Late(0), Late(1)], [Late(7), Late(8)]
    device, delivered, failed = LateDevice(steps, copies), list[Any](), list[BaseException]()
    thread = DeviceThread(device, delivered.append, failed.append)  # type: ignore[arg-type]
    for number in range(2):
        thread.run(Work(number, [], [], [], []))
        thread.export(number, 1, [], 2)
    thread.clear(0)
    assert device.cleared.wait(10)
    wait_for(lambda: len(device.entered) == 3)
    assert device.entered[0] == "device" and {*device.entered[1:]} == {"device-steps", "device-copies"}
    assert not any(pending.threads for pending in steps + copies), "they enter before they wait"
    for pending in steps + copies:
        pending.over.set()
    thread.close()
    assert len(delivered) == 4 and len(device.entered) == 3 and not failed


def test_a_thread_that_cannot_enter_the_device_fails_it() -> None:
    device, failed = LateDevice([], []), list[BaseException]()

    def refuse() -> None:
        raise RuntimeError("no such device")

    device.enter_thread = refuse  # type: ignore[method-assign]
    thread = DeviceThread(device, lambda report: None, failed.append)  # type: ignore[arg-type]
    thread.clear(0)
    thread.close()
    assert [str(error) for error in failed] == ["no such device"] and not device.cleared.is_set()


def test_a_waiter_keeps_nothing_of_what_it_has_delivered() -> None:
    """A copy's host memory is free when its last reference is gone, which must not wait for the next copy."""
    copy = Late(7)
    gone = weakref.ref(copy)
    device, delivered = LateDevice([], [copy]), list[Any]()
    thread = DeviceThread(device, delivered.append, lambda error: None)  # type: ignore[arg-type]
    thread.export(0, 1, [], 2)
    thread.clear(0)
    assert device.cleared.wait(10)
    over, device.copies = copy.over, []
    del copy
    over.set()
    wait_for(lambda: gone() is None)
    thread.close()
    assert delivered == [ran(7)]


def test_no_call_is_made_after_a_copy_that_raises() -> None:
    copy = Late(7, RuntimeError("the device is gone"))
    device, delivered, failed = LateDevice([], [copy]), list[Any](), list[BaseException]()
    thread = DeviceThread(device, delivered.append, failed.append)  # type: ignore[arg-type]
    thread.export(0, 1, [], 2)
    thread.clear(0)
    assert device.cleared.wait(10)
    copy.over.set()
    thread._copies._thread.join(10)
    device.cleared.clear()
    thread.clear(1)
    thread.close()
    assert delivered == [] and not device.cleared.is_set()
    assert [str(error) for error in failed] == ["the device is gone"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_nothing_is_delivered_or_called_after_a_step_that_raises() -> None:
    steps = [Late(0, RuntimeError("the device is gone")), Late(1)]
    device, thread, delivered, failed = run_steps(steps)
    for step in steps:
        step.over.set()
    thread._steps._thread.join(10)
    device.cleared.clear()
    thread.clear(1)
    thread.close()
    assert delivered == [] and not device.cleared.is_set()
    assert [str(error) for error in failed] == ["the device is gone"]
