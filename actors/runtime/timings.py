"""Measurements of how long messages wait, how long actors work, and how long the device idles between steps."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, cast

from baton.actors.forward.device import Work
from baton.actors.forward.launching import Device, Done, Pending, Report
from baton.actors.messages import Ran
from baton.actors.runtime.events import Event, StepEvent

BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0)


class Histogram:
    """A histogram of durations in seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # counts[i]: above BOUNDS[i-1], up to BOUNDS[i]; the last: all longer
        self.total = 0.0  # the sum of all durations

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value


class Timings:
    """Totals in seconds since the process began. They outlive a restart of the actors."""

    def __init__(self) -> None:
        self.waits: defaultdict[str, Histogram] = defaultdict(Histogram)  # times from send to delivery, by actor
        self.busy: defaultdict[str, float] = defaultdict(float)  # time in `receive` and `act`, by actor
        self.overhead = Histogram()
        """Idle time of the device between two steps that share a row, which could have continued at once.

        It includes the delay of the ring, and copies that the device makes between the steps.
        """
        self.device_busy = 0.0  # seconds that the device has spent in steps
        self.steps = 0


class TimedDevice:
    """A wrapper around a device that times its steps. It runs on the device's threads."""

    def __init__(
        self, device: Device, timings: Timings, clock: Callable[[], float], on_event: Callable[[Event], None] | None
    ) -> None:
        self._device = device
        self._timings = timings
        self._clock = clock
        self._on_event = on_event
        self._rows: set[int] = set()  # the rows of the step that was launched last
        self._ended = 0.0  # when the last step ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def open_row(self, row: int, *more: Any) -> None:
        """Open a row for a new request. The time since the row's last step then does not count as idle time."""
        self._rows.discard(row)
        self._device.open_row(row, *more)

    def launch(self, work: Work) -> Pending[Ran]:
        rows = {*work.decodes, *(chunk.row for chunk in work.chunks)}
        if not rows:
            return self._device.launch(work)  # accepted drafts of a row that is gone
        follows, self._rows = not rows.isdisjoint(self._rows), rows
        return ObservedPending(self._device.launch(work), lambda seconds: self._done(work, len(rows), follows, seconds))

    def _done(self, work: Work, rows: int, follows: bool, seconds: float) -> None:
        """Count a step that is over. Called on the thread that collects it.

        follows: whether the step has a row in common with the step launched before it.
        """
        ended, timings = self._clock(), self._timings
        began, before, self._ended = ended - seconds, self._ended, ended
        if not seconds:  # The step failed: how long the device was busy is not known.
            return
        if follows:
            timings.overhead.observe(max(began - before, 0.0))
        timings.steps += 1
        timings.device_busy += seconds
        if self._on_event is not None:
            tokens = len(work.decodes) + sum(chunk.stop - chunk.start for chunk in work.chunks)
            tokens += sum(len(draft.tokens) for draft in work.drafts)
            self._on_event(StepEvent(work.step, began, ended, rows, tokens))


@dataclass(frozen=True, slots=True)
class ObservedPending(Generic[Report]):
    """A Pending that calls `on_done` with its duration."""

    pending: Pending[Report]
    on_done: Callable[[float], None]  # called when the Pending is collected, with the seconds that the device took

    def passed(self) -> bool:
        return self.pending.passed()

    def collect(self) -> Done[Report]:
        done = self.pending.collect()
        self.on_done(done.seconds)
        return done


def timed(
    device: Device, timings: Timings, clock: Callable[[], float], on_event: Callable[[Event], None] | None
) -> Device:
    """Return the device in a TimedDevice, which passes on all calls that it does not time."""
    return cast(Device, TimedDevice(device, timings, clock, on_event))
