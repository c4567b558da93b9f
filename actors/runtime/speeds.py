"""Measurements of how long steps and copies to and from host memory take, for the scheduler's plans and the cache."""

import threading
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any, cast

from msgspec.structs import astuple

from baton.actors.cache.worth.order import Costs
from baton.actors.control import Speeds
from baton.actors.forward.device import Work
from baton.actors.forward.launching import Device, Pending
from baton.actors.messages import Ran, Transferred
from baton.actors.runtime.timings import ObservedPending

# Steps with fewer prompt tokens say little about Speeds.operation: most of their time goes into reading the weights.
LEAST_TOKENS = 16
# Weight of the past when a measurement is added to a Pace.
REMEMBERED = 0.9
# Weight of the past when a step is added to a Line. It is larger than for a Pace, because few steps differ enough in
# size to separate the cost of a token from the fixed cost.
REMEMBERED_STEPS = 0.99
# Steps of nearly the same size cannot separate the cost of a token from the fixed cost. This share of the squared size
# pulls the estimate towards no fixed cost (ridge regression).
PROPORTION = 0.01
# A token costs at least this share of the average step time per token.
LEAST_PART = 0.125
# A step or copy in which the process seems to have been stopped takes at least this many times the expected time,
INTERRUPTED = 10
# and the processor time of the process advances by less than this share of that.
STOPPED = 0.1
# Speeds are reported again when one has changed by this factor.
CHANGED = 1.1


# Seconds that a step with drafts may wait for the one before it to be settled, also on a small model.
LONGEST_TURN = 0.02


class Pace:
    """A moving average of the seconds that one piece of work takes: one operation, one byte or one step.

    The first measurement counts until there is a second one: the first step of a size is recorded for later ones, which
    takes longer.
    """

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0
        self._number = 0  # number of measurements

    def add(self, amount: float, seconds: float, is_new: bool = False) -> None:
        """Add a measurement. is_new: it is the first of its size, which may have taken longer.

        Such a measurement only counts if there is no other, or if it took less time than the others.
        """
        if is_new and self._number and seconds >= amount * self.value:
            return
        remembered = REMEMBERED if self._number > 1 else 0.0
        self._amount = remembered * self._amount + amount
        self._seconds = remembered * self._seconds + seconds
        self._number += 1

    @property
    def value(self) -> float:
        """Seconds for one piece of work; 0 before the first measurement."""
        return self._seconds / self._amount if self._amount else 0.0


class Line:
    """A moving least-squares fit of the time of steps: seconds per token, and fixed seconds per step.

    If recent steps cannot separate the two, the time is attributed to the tokens.
    """

    def __init__(self) -> None:
        self._steps = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._steps = REMEMBERED_STEPS * self._steps + 1
        self._tokens = REMEMBERED_STEPS * self._tokens + tokens
        self._seconds = REMEMBERED_STEPS * self._seconds + seconds
        self._squares = REMEMBERED_STEPS * self._squares + tokens * tokens
        self._products = REMEMBERED_STEPS * self._products + tokens * seconds

    @property
    def parts(self) -> tuple[float, float]:
        """Seconds per token, and fixed seconds per step; both are 0 before the first measurement."""
        if not self._steps:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._steps, self._seconds / self._steps
        together = self._products / self._steps - (1 - PROPORTION) * tokens * seconds
        spread = self._squares / self._steps - (1 - PROPORTION) * tokens * tokens
        most = seconds / tokens
        each = min(max(together / spread, LEAST_PART * most), most)
        return each, max(seconds - each * tokens, 0.0)


class Interruptions:
    """Durations that do not count, because the process did not run meanwhile: between SIGSTOP and SIGCONT, for example.

    Nothing shows directly that a process was stopped. Its processor time does not advance then; but it does not either
    while a step runs on another device, so the step must also have taken far longer than expected. If that happens
    twice in a row, the device has become slow, and the second duration counts.
    """

    def __init__(self, processor_time: Callable[[], float]) -> None:
        """processor_time: the processor seconds of this process so far."""
        self._processor_time = processor_time
        self._was_long = False

    def begin(self) -> float:
        """Return the beginning of some work, for `counts`."""
        return self._processor_time()

    def counts(self, began: float, seconds: float, expected: float) -> bool:
        """Return whether the duration of some work is a measurement. expected: its seconds; 0: not known yet."""
        used = self._processor_time() - began
        is_long = 0 < INTERRUPTED * expected < seconds
        counts = not is_long or self._was_long or used >= STOPPED * seconds
        self._was_long = is_long
        return counts


class MeasuredDevice:
    """A wrapper around a device that reports its Speeds when they have changed. It runs on the device's threads."""

    def __init__(
        self,
        device: Device,
        costs: Costs,
        page_size: int,
        report: Callable[[Speeds], None],
        processor_time: Callable[[], float],
    ) -> None:
        self._device, self._costs, self._page_size, self._report = device, costs, page_size, report
        self._changing = threading.Lock()
        self._steps, self._copies = Interruptions(processor_time), Interruptions(processor_time)
        self._computing, self._moving, self._beside = Pace(), Pace(), Line()
        self._decoding: dict[int, Pace] = {}  # steps without prompts and drafts, by their number of rows
        self._rows = 0  # rows of the newest such step
        self._sizes = set[tuple[int, int, int]]()  # rows, drafts and predicted tokens of steps without prompts so far
        self._drafting, self._predicting, self._turning = Pace(), Pace(), Pace()
        self._drafted = 0.0  # when the last step ended, by perf_counter; 0: it had neither drafts nor predictions
        self._reported = Speeds()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, work: Work) -> Pending[Ran]:
        if self._drafted and work.decodes:
            waited, self._drafted = perf_counter() - self._drafted, 0.0
            # After a longer time there was nothing to compute.
            if waited < max(self._decode(self._rows), LONGEST_TURN):
                self._turning.add(1, waited)
        began = self._steps.begin()
        return ObservedPending(self._device.launch(work), lambda seconds: self._done(work, began, seconds))

    def _done(self, work: Work, began: float, seconds: float) -> None:
        """Add a step that is over. A failed step reports 0 seconds, and is ignored."""
        with self._changing:
            if seconds > 0 and self._steps.counts(began, seconds, self._expected(work)):
                self._computed(work, seconds)
            if work.predictions or any(draft.tokens for draft in work.drafts):
                self._drafted = perf_counter()
            self._say()

    def _expected(self, work: Work) -> float:
        """Return the seconds that a step should take, drafts not counted; 0 if that is not known yet."""
        tokens, decode = tokens_of(work), self._decode(len(work.decodes))
        each, fixed = self._beside.parts
        if (tokens and not each) or (work.decodes and not decode):
            return 0.0
        return decode + (fixed + each * tokens if tokens else 0.0)

    def _decode(self, rows: int) -> float:
        """Return the seconds of a step without prompts and drafts, of `rows` rows or the nearest measured number.

        Return 0 for no rows, and before the first measurement.
        """
        if not rows or not self._decoding:
            return 0.0
        if rows not in self._decoding:
            rows = min(self._decoding, key=lambda measured: abs(measured - rows))
        return self._decoding[rows].value

    def _computed(self, work: Work, seconds: float) -> None:
        tokens = tokens_of(work)
        if tokens >= LEAST_TOKENS:
            prompts = sum(self._costs.saved(chunk.start, chunk.stop) for chunk in work.chunks)
            decodes = sum(self._costs.saved(position, position + 1) for position in work.positions)
            self._computing.add(prompts + decodes, seconds)
        speculates = drafts_of(work) or predicted_by(work)
        if not tokens:
            self._decoded(work, seconds)
        elif not speculates and (work.decodes or not any(self._beside.parts)):
            # Until the first mixed step, steps with only prompts are used instead.
            self._beside.add(tokens, max(seconds - self._decode(len(work.decodes)), 0.0))

    def _decoded(self, work: Work, seconds: float) -> None:
        """Add a step without prompts."""
        rows, drafts, predicted = size = len(work.decodes), drafts_of(work), predicted_by(work)
        is_new = size not in self._sizes
        self._sizes.add(size)
        if not rows:
            pass  # accepted drafts of a row that is gone
        elif (drafts or predicted) and self._decoding:
            self._speculated(drafts, predicted, max(seconds - self._decode(rows), 0.0), is_new)
        elif not work.drafts and not predicted and not (is_new and self._decoding):
            self._rows = rows
            self._decoding.setdefault(rows, Pace()).add(1, seconds)

    def _speculated(self, drafts: int, predicted: int, seconds: float, is_new: bool) -> None:
        """Add the extra seconds of a step with drafts, predictions or both.

        If there are both, what predictions alone have been seen to cost is subtracted, and the rest is the drafts'.

        is_new: no step had as many rows, drafts and predictions before.
        """
        if not predicted:
            self._drafting.add(drafts, seconds, is_new)
        elif not drafts:
            self._predicting.add(predicted, seconds, is_new)
        elif self._predicting.value:
            self._drafting.add(drafts, max(seconds - predicted * self._predicting.value, 0.0), is_new)

    def export(self, key: int, slot: int, pages: list[int], position: int) -> Pending[Transferred]:
        return self._timed(position, self._device.export(key, slot, pages, position))

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> Pending[Transferred]:
        tokens = len(pages) * self._page_size
        return self._timed(tokens, self._device.fill(grant, key, slot, pages, first_page))

    def _timed(self, tokens: int, copy: Pending[Transferred]) -> Pending[Transferred]:
        began = self._copies.begin()
        return ObservedPending(copy, lambda seconds: self._moved(tokens, began, seconds))

    def _moved(self, tokens: int, began: float, seconds: float) -> None:
        """Add a copy that is over. A failed copy reports 0 seconds, and is ignored."""
        size = self._costs.slot + self._costs.token * tokens
        with self._changing:
            if seconds > 0 and self._copies.counts(began, seconds, size * self._moving.value):
                self._moving.add(size, seconds)
            self._say()

    def _say(self) -> None:
        paces = self._computing.value, self._moving.value, self._decode(self._rows)
        prompt, mixed = self._beside.parts
        speculating = self._drafting.value, self._turning.value, self._predicting.value
        now = Speeds(*paces, prompt, mixed, *speculating, self._rows)
        pairs = zip(astuple(now), astuple(self._reported), strict=True)
        if any(new > CHANGED * old or old > CHANGED * new for new, old in pairs):
            self._reported = now
            self._report(now)


def tokens_of(work: Work) -> int:
    """Return the number of prompt tokens of a step."""
    return sum(chunk.stop - chunk.start for chunk in work.chunks)


def drafts_of(work: Work) -> int:
    """Return the number of drafts that a step feeds."""
    return sum(len(draft.tokens) for draft in work.drafts)


def predicted_by(work: Work) -> int:
    """Return the most tokens that a step predicts for a row."""
    return max((prediction.tokens for prediction in work.predictions), default=0)


def measured(
    device: Device,
    costs: Costs,
    page_size: int,
    report: Callable[[Speeds], None],
    processor_time: Callable[[], float] = process_time,
) -> Device:
    """Return the device in a MeasuredDevice, which passes on all calls that it does not measure."""
    return cast(Device, MeasuredDevice(device, costs, page_size, report, processor_time))
