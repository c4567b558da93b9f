"""Faults of a device outside of a step: each stays with the row, or with the copy, that it was for."""

from collections.abc import Callable

from actors.forward.device import Device, Work
from actors.messages import Ran, Unmade
from actors.requests import Request


class ContainedDevice:
    """Around a device, on its thread. A row that could not be set up or extended fails in its next step.

    contains: whether the device can go on after this error; one that it cannot go on after is raised.
    """

    def __init__(
        self, device: Device, deliver: Callable[[Ran | Unmade], None], contains: Callable[[Exception], bool]
    ) -> None:
        self._device = device
        self._deliver = deliver
        self._contains = contains
        self._broken: dict[int, str] = {}
        self._setup_error = ""  # of the row that is opened next: its slot and pages are made ready just before

    def clear(self, slot: int) -> None:
        self._set_up(lambda: self._device.clear(slot))

    def copy(self, source: int, target: int) -> None:
        self._set_up(lambda: self._device.copy(source, target))

    def copy_page(self, source: int, target: int) -> None:
        self._set_up(lambda: self._device.copy_page(source, target))

    def fill(self, key: int, slot: int, pages: list[int], first_page: int) -> None:
        self._set_up(lambda: self._device.fill(key, slot, pages, first_page))

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self._set_up(lambda: self._device.open_row(row, grant, slot, request, pages))
        self._broken.pop(row, None)
        if self._setup_error:
            self._broken[row], self._setup_error = self._setup_error, ""

    def extend_row(self, row: int, pages: list[int]) -> None:
        if error := self._error_of(lambda: self._device.extend_row(row, pages)):
            self._broken.setdefault(row, error)

    def run(self, work: Work) -> None:
        rows = [*(chunk.row for chunk in work.chunks), *work.decodes]
        broken = next((self._broken[row] for row in rows if row in self._broken), "")
        if error := broken or self._error_of(lambda: self._device.run(work)):
            self._deliver(Ran(work.step, b"", [], [], error=error))

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        if error := self._error_of(lambda: self._device.export(key, slot, pages, position)):
            self._deliver(Unmade(key, error))

    def poison(self, slot: int) -> None:
        self._device.poison(slot)

    def drop(self, key: int) -> None:
        self._device.drop(key)

    def drop_all(self) -> None:
        self._setup_error = ""
        self._device.drop_all()

    def _set_up(self, call: Callable[[], None]) -> None:
        error = self._error_of(call)
        self._setup_error = self._setup_error or error

    def _error_of(self, call: Callable[[], None]) -> str:
        try:
            call()
        except Exception as error:
            if not self._contains(error):
                raise
            return f"{type(error).__name__}: {error}"
        return ""
