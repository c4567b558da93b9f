"""The device's thread: every call arrives, in order, and the first that raises is the last."""

import threading
from typing import Any

from actors.forward.device import DeviceThread, Work
from actors.requests import Request, Sampling, Stops


class NotedCalls:
    """A device of which `run` raises if its step is 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self._note(name, *given)

    def _note(self, name: str, *given: Any) -> None:
        self.calls.append((name, *given))
        self.threads.add(threading.current_thread().name)
        if name == "run" and given[0].step == 0:
            raise RuntimeError("the device is gone")


def test_every_call_is_carried_out_in_order_on_the_thread() -> None:
    device, failed = NotedCalls(), list[BaseException]()
    thread = DeviceThread(device, failed.append)  # type: ignore[arg-type]
    request = Request("r", b"", 0, Sampling(), Stops(1))
    work = Work(1, [], [], [], [])
    expected = [
        ("clear", 1),
        ("poison", 2),
        ("copy", 3, 4),
        ("copy_page", 5, 6),
        ("export", 7, 8, [9], 10),
        ("fill", 11, 12, [13], 14),
        ("drop", 15),
        ("drop_all",),
        ("open_row", 16, 17, 18, request, [19]),
        ("extend_row", 20, [21]),
        ("run", work),
    ]
    for name, *given in expected:
        getattr(thread, name)(*given)
    thread.close()
    assert device.calls == expected and not failed and device.threads == {"device"}


def test_behind_a_call_that_raises_none_is_carried_out() -> None:
    device, failed = NotedCalls(), list[BaseException]()
    thread = DeviceThread(device, failed.append)  # type: ignore[arg-type]
    thread.run(Work(0, [], [], [], []))
    thread.clear(1)
    thread.close()
    assert [name for name, *_ in device.calls] == ["run"]
    assert [str(error) for error in failed] == ["the device is gone"]
