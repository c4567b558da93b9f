"""Containment of device errors: an error outside of a step fails only the row, or the copy, that it was for."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic

from msgspec.structs import replace

from baton.actors.forward.device import Work, WorkMask
from baton.actors.forward.launching import Device, Done, Pending, Report
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request


class ContainedDevice:
    """A wrapper around a device, on the device's thread. A row that could not be set up or grow is left out of steps.

    contains: returns whether the device is still usable after an error; if not, the error is raised.
    """

    def __init__(self, device: Device, contains: Callable[[Exception], bool]) -> None:
        self._device = device
        self._contains = contains
        self._grants: dict[int, int] = {}  # by row
        self._broken: dict[int, str] = {}  # rows that could not be set up or extended, with the error
        self._setup_error = ""  # why the slot or pages of the row that is opened next could not be prepared

    @property
    def copies_aside(self) -> bool:
        return self._device.copies_aside

    def enter_thread(self) -> None:
        self._device.enter_thread()

    def clear(self, slot: int) -> None:
        self._set_up(lambda: self._device.clear(slot))

    def copy(self, source: int, target: int) -> None:
        self._set_up(lambda: self._device.copy(source, target))

    def copy_page(self, source: int, target: int) -> None:
        self._set_up(lambda: self._device.copy_page(source, target))

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self._set_up(lambda: self._device.open_row(row, grant, slot, request, pages))
        self._grants[row] = grant
        self._broken.pop(row, None)
        if self._setup_error:
            self._broken[row], self._setup_error = self._setup_error, ""

    def extend_row(self, row: int, pages: list[int]) -> None:
        if error := self._error_of(lambda: self._device.extend_row(row, pages)):
            self._broken.setdefault(row, error)

    def prepare(self, work: Work) -> None:
        self._error_of(lambda: self._device.prepare(work))  # `launch` prepares again, and reports the error

    def launch(self, work: Work) -> Pending[Ran]:
        failed = partial(_failed_step, work.step)
        rows = [*(chunk.row for chunk in work.chunks), *work.decodes]
        broken = {row: self._broken[row] for row in rows if row in self._broken}
        if not broken:
            return self._contained(lambda: self._device.launch(work), failed)
        if len(broken) == len(rows):
            return failed(next(iter(broken.values())))
        pending = self._contained(lambda: self._device.launch(without(work, broken)), failed)
        return PendingWithout(pending, {self._grants[row]: error for row, error in broken.items()})

    def export(self, key: int, slot: int, pages: list[int], position: int) -> Pending[Transferred]:
        return self._contained(
            lambda: self._device.export(key, slot, pages, position), partial(_failed_copy, key, None)
        )

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> Pending[Transferred]:
        failed = partial(_failed_copy, key, grant)
        return self._contained(lambda: self._device.fill(grant, key, slot, pages, first_page), failed)

    def poison(self, slot: int) -> None:
        self._device.poison(slot)

    def drop(self, key: int) -> None:
        self._device.drop(key)

    def drop_all(self) -> None:
        self._setup_error = ""
        self._device.drop_all()

    def _set_up(self, call: Callable[[], None]) -> None:
        """Make a call that prepares the row to be opened next, and keep the first error of such calls."""
        error = self._error_of(call)
        self._setup_error = self._setup_error or error

    def _error_of(self, call: Callable[[], None]) -> str:
        """Make a call, and return its error; "" if there is none."""
        try:
            call()
        except Exception as error:
            if not self._contains(error):
                raise
            return _text(error)
        return ""

    def _contained(self, call: Callable[[], Pending[Report]], failed: Callable[[str], Done[Report]]) -> Pending[Report]:
        try:
            return ContainedPending(call(), self._contains, failed)
        except Exception as error:
            if not self._contains(error):
                raise
            return failed(_text(error))


@dataclass(frozen=True, slots=True)
class ContainedPending(Generic[Report]):
    """A Pending that returns the report of a failure instead of raising the error."""

    pending: Pending[Report]
    contains: Callable[[Exception], bool]  # returns whether the device is still usable after an error
    failed: Callable[[str], Done[Report]]  # returns what to report, given the error

    def passed(self) -> bool:
        return self.pending.passed()

    def collect(self) -> Done[Report]:
        try:
            return self.pending.collect()
        except Exception as error:
            if not self.contains(error):
                raise
            return self.failed(_text(error))


@dataclass(frozen=True, slots=True)
class PendingWithout:
    """The Pending of a step that runs without some of its rows."""

    pending: Pending[Ran]
    broken: dict[int, str]  # as in Ran

    def passed(self) -> bool:
        return self.pending.passed()

    def collect(self) -> Done[Ran]:
        """Wait for the step. Its seconds are not known: a device that measures steps would count its broken rows."""
        return Done(replace(self.pending.collect().report, broken=self.broken), 0.0)


def without(work: Work, rows: Collection[int]) -> Work:
    """Return a step without these rows."""
    decodes = [at for at, row in enumerate(work.decodes) if row not in rows]
    return replace(
        work,
        chunks=[chunk for chunk in work.chunks if chunk.row not in rows],
        decodes=[work.decodes[at] for at in decodes],
        positions=[work.positions[at] for at in decodes],
        checkpoints=[checkpoint for checkpoint in work.checkpoints if checkpoint.row not in rows],
        masks=[mask for mask in work.masks if mask.row not in rows],
        drafts=[draft for draft in work.drafts if draft.row not in rows],
        predictions=[prediction for prediction in work.predictions if prediction.row not in rows],
        late=masks_without(work.late, rows) if work.late is not None else None,
    )


def masks_without(late: Future[list[WorkMask]], rows: Collection[int]) -> Future[list[WorkMask]]:
    """Return the future of those late masks that are for other rows."""
    left = Future[list[WorkMask]]()
    late.add_done_callback(lambda come: left.set_result([mask for mask in come.result() if mask.row not in rows]))
    return left


def _failed_step(step: int, error: str) -> Done[Ran]:
    return Done(Ran(step, b"", [], [], error=error), 0.0)


def _failed_copy(key: int, grant: int | None, error: str) -> Done[Transferred]:
    return Done(Transferred(key, grant, error), 0.0)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
