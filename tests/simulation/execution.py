"""The hash device's calls, made by the server's own ContainedDevice, so that its handling of errors is tested too."""

from collections import Counter
from typing import TYPE_CHECKING

from baton.actors.forward.device import Work
from baton.actors.forward.launching import Done, Pending
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request

if TYPE_CHECKING:
    from tests.simulation.hash_device import HashDevice


class InjectedFault(Exception):
    """An error that a call on the device raises because the scenario says so."""


class Execution:
    """The calls of a HashDevice, some of which raise as the scenario says."""

    def __init__(self, device: "HashDevice") -> None:
        # (name, number) of each call that raises; numbers count from 1 for each name.
        self.bad_calls: set[tuple[str, int]] = set()
        self.struck: Counter[str] = Counter()  # number of calls that have raised, by name
        self._device = device
        self._calls: Counter[str] = Counter()

    @property
    def copies_aside(self) -> bool:
        return self._device.copies_aside

    def enter_thread(self) -> None:
        raise NotImplementedError

    def clear(self, slot: int) -> None:
        self._strike("clear")
        self._device._write(slot, 0)

    def copy(self, source: int, target: int) -> None:
        self._strike("copy")
        self._device._copy(source, target)

    def copy_page(self, source: int, target: int) -> None:
        self._strike("copy_page")
        self._device._copy_page(source, target)

    def export(self, key: int, slot: int, pages: list[int], position: int) -> Pending[Transferred]:
        self._device.exporting.remove(key)
        try:
            self._strike("export")
        except InjectedFault:
            self._device.unmade.add(key)
            raise
        self._device._export(key, slot, pages, position)
        return Done(Transferred(key), 0.0)

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> Pending[Transferred]:
        self._strike("fill")
        if key in self._device.unmade:
            raise InjectedFault(f"injected: copy {key} could not be made")
        self._device._fill(key, slot, pages, first_page)
        return Done(Transferred(key, grant), 0.0)

    def drop(self, key: int) -> None:
        self._device._drop(key)

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self._device._open_row(row, grant, slot, request, pages)
        self._strike("open_row")  # Raise after the work, so that the row is left half-opened.

    def extend_row(self, row: int, pages: list[int]) -> None:
        self._strike("extend_row")
        self._device._extend_row(row, pages)

    def launch(self, work: Work) -> Pending[Ran]:
        return Done(self._device._run(work), 0.0)

    def poison(self, slot: int) -> None:
        raise NotImplementedError

    def drop_all(self) -> None:
        raise NotImplementedError

    def _strike(self, name: str) -> None:
        self._calls[name] += 1
        if (name, self._calls[name]) in self.bad_calls:
            self.struck[f"bad {name}"] += 1
            raise InjectedFault(f"injected: {name}")
