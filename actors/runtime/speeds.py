"""How fast the device computes prompts, and moves states to host memory and back, measured on its thread."""

from collections.abc import Callable
from typing import Any, cast

from msgspec.structs import astuple

from actors.cache.worth.order import Costs
from actors.control import Speeds
from actors.forward.device import Device, Work

# Steps with fewer tokens of prompts say little: reading the weights takes most of their time.
LEAST_TOKENS = 16
REMEMBERED = 0.9
# Told again when it is so much more or less.
CHANGED = 1.1


class Pace:
    """Seconds for a unit of something, over what was done of late."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = REMEMBERED * self._amount + amount
        self._seconds = REMEMBERED * self._seconds + seconds

    @property
    def value(self) -> float:
        """0 as long as nothing was done."""
        return self._seconds / self._amount if self._amount else 0.0


class MeasuredDevice:
    """Runs on the device's thread, around a device, and reports its Speeds when they have changed.

    Where the device only enqueues its copies, as a GPU does, they seem to take no longer than that.
    """

    def __init__(
        self,
        device: Device,
        costs: Costs,
        page_size: int,
        clock: Callable[[], float],
        report: Callable[[Speeds], None],
    ) -> None:
        self._device, self._costs, self._page_size = device, costs, page_size
        self._clock, self._report = clock, report
        self._computing, self._moving, self._decoding, self._beside = Pace(), Pace(), Pace(), Pace()
        self._said = Speeds()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, work: Work) -> None:
        seconds = self._timed(lambda: self._device.run(work))
        tokens = sum(chunk.stop - chunk.start for chunk in work.chunks)
        if tokens >= LEAST_TOKENS:
            prompts = sum(self._costs.saved(chunk.start, chunk.stop) for chunk in work.chunks)
            decodes = sum(self._costs.saved(position, position + 1) for position in work.positions)
            self._computing.add(prompts + decodes, seconds)
        if not tokens:
            self._decoding.add(1, seconds)
        elif work.decodes or not self._beside.value:
            decoding = self._decoding.value if work.decodes else 0.0
            self._beside.add(tokens, max(seconds - decoding, 0.0))
        self._say()

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        self._move(position, lambda: self._device.export(key, slot, pages, position))

    def fill(self, key: int, slot: int, pages: list[int], first_page: int) -> None:
        self._move(len(pages) * self._page_size, lambda: self._device.fill(key, slot, pages, first_page))

    def _move(self, tokens: int, call: Callable[[], None]) -> None:
        self._moving.add(self._costs.slot + self._costs.token * tokens, self._timed(call))
        self._say()

    def _timed(self, call: Callable[[], None]) -> float:
        began = self._clock()
        call()
        return self._clock() - began

    def _say(self) -> None:
        now = Speeds(self._computing.value, self._moving.value, self._decoding.value, self._beside.value)
        pairs = zip(astuple(now), astuple(self._said), strict=True)
        if any(new > CHANGED * old or old > CHANGED * new for new, old in pairs):
            self._said = now
            self._report(now)


def measured(
    device: Device, costs: Costs, page_size: int, clock: Callable[[], float], report: Callable[[Speeds], None]
) -> Device:
    return cast(Device, MeasuredDevice(device, costs, page_size, clock, report))
