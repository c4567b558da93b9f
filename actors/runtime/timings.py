"""How long messages wait, how long actors work, and how long the device has to wait for them."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, cast

from baton.actors.forward.device import Device, Done, Pending, Report, Work
from baton.actors.messages import Ran
from baton.actors.runtime.events import Event, StepEvent

BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0)


class Histogram:
    """Seconds, counted by size. counts[i]: values above BOUNDS[i-1] and at most BOUNDS[i]; the last: the rest.

    total: their sum.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value


class Timings:
    """Seconds, since the process began; they outlive the unit of actors.

    waits: from send to delivery, by actor; busy: in `receive` and `act`, by actor.
    overhead: from the end of a step to the beginning of the next, where they have a row in common: then the device had
    work and was not told. It holds the ring's delay, and what the device copies between the steps.
    """

    def __init__(self) -> None:
        self.waits: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.overhead = Histogram()
        self.device_busy = 0.0
        self.steps = 0


class TimedDevice:
    """Around a device, on its threads; of everything but steps it takes no time."""

    def __init__(
        self, device: Device, timings: Timings, clock: Callable[[], float], on_event: Callable[[Event], None] | None
    ) -> None:
        self._device = device
        self._timings = timings
        self._clock = clock
        self._on_event = on_event
        self._rows: set[int] = set()
        self._ended = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def open_row(self, row: int, *more: Any) -> None:
        """A new request may have waited in the queue: the row is no longer one that the last step had."""
        self._rows.discard(row)
        self._device.open_row(row, *more)

    def launch(self, work: Work) -> Pending[Ran]:
        rows = {*work.decodes, *(chunk.row for chunk in work.chunks)}
        follows, self._rows = not rows.isdisjoint(self._rows), rows
        return ObservedPending(self._device.launch(work), lambda seconds: self._done(work, len(rows), follows, seconds))

    def _done(self, work: Work, rows: int, follows: bool, seconds: float) -> None:
        """The step is over. On the thread that collects it."""
        ended, timings = self._clock(), self._timings
        began = ended - seconds
        if follows:
            timings.overhead.observe(max(began - self._ended, 0.0))
        self._ended = ended
        timings.steps += 1
        timings.device_busy += seconds
        if self._on_event is not None:
            tokens = len(work.decodes) + sum(chunk.stop - chunk.start for chunk in work.chunks)
            self._on_event(StepEvent(work.step, began, ended, rows, tokens))


@dataclass(frozen=True, slots=True)
class ObservedPending(Generic[Report]):
    """on_done: called with the seconds that it took, when it is collected."""

    pending: Pending[Report]
    on_done: Callable[[float], None]

    def passed(self) -> bool:
        return self.pending.passed()

    def collect(self) -> Done[Report]:
        done = self.pending.collect()
        self.on_done(done.seconds)
        return done


def timed(
    device: Device, timings: Timings, clock: Callable[[], float], on_event: Callable[[Event], None] | None
) -> Device:
    return cast(Device, TimedDevice(device, timings, clock, on_event))
