"""The interface of a device to its own threads: they launch steps and copies, and collect the results later."""

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from baton.actors.forward.device import DeviceCalls, Work
from baton.actors.messages import Ran, Transferred

Report = TypeVar("Report", bound=Ran | Transferred, covariant=True)


class Device(DeviceCalls, Protocol):
    """The device as its thread sees it. Results are returned as Pendings."""

    def enter_thread(self) -> None:
        """Make the calling thread use the device. Every thread that makes calls or collects results does this first."""
        ...

    def prepare(self, work: Work) -> None:
        """Do all of a step that comes before its computation, so that its launch need not do it.

        The next call must be the step's launch.
        """

    def launch(self, work: Work) -> "Pending[Ran]":
        """Enqueue a step."""
        ...

    def export(self, key: int, slot: int, pages: list[int], position: int) -> "Pending[Transferred]":
        """Enqueue a copy to host memory: see DeviceQueue."""
        ...

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> "Pending[Transferred]":
        """Enqueue a copy from host memory: see DeviceQueue."""
        ...


class Pending(Protocol[Report]):
    """A step or a copy that has been enqueued.

    A Pending holds all that its report needs: its rows may belong to other requests when it is collected.
    """

    def passed(self) -> bool:
        """Return whether the work is over, so that `collect` does not wait."""
        ...

    def collect(self) -> "Done[Report]":
        """Wait until the work is over, and return its result. Call once. Raises the error of the device, if any."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[Report]):
    """A step or a copy that is over. It is also a Pending, whose `collect` does not wait."""

    report: Report
    seconds: float  # seconds that the device took; 0 if the work, or a row of it, failed

    def passed(self) -> bool:
        return True

    def collect(self) -> Self:
        return self
