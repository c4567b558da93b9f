"""How likely a cached state is to be used, and how soon: learned while serving, by kind of state and by age.

A *risk* is estimated for each kind and each step of age: uses at that age, over the time that states were watched in it
(the estimator of life tables; Kaplan and Meier, 1958). From the risks follows an *index* for a state of some age: over
all times that it may be kept from now on, the best ratio of the probability of a use in that time to the expected time
until then (Gittins, 1979). A cache that always evicts the state with the least index times saving, for its size, keeps
what pays best (compare LHD: Beckmann, Chen and Cidon, NSDI 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, log

from baton.actors.kinds import Kind

STEPS = 40
# Ages are counted in uses of the pool. The steps begin at 0, 1, 2, 4, 6, 10, 14, 22, …: two in each octave.
BEGINS = tuple((2 << step // 2) + (1 << step // 2) * (step % 2) - 2 for step in range(STEPS + 1))
WIDTHS = tuple(BEGINS[step + 1] - BEGINS[step] for step in range(STEPS))
LEARNED_AFTER = 64  # observations of a kind after which its indices are computed again
REMEMBERED = 0.97  # factor by which older observations count less each time
PRIOR_LIVES = 8  # the prior counts as much as this many observed states
NEGLIGIBLE = 1e-3  # the probability that a state is still unused below which longer times are not considered


@dataclass(frozen=True, slots=True)
class Prior:
    """The assumption about a kind of state before anything is learned."""

    share: float  # of such states that are used again
    within: float  # their mean age then, in uses of the pool


PRIORS: dict[Kind, Prior] = {
    Kind.FRONTIER: Prior(0.8, 200),
    Kind.NEW: Prior(0.4, 200),
    Kind.NAMED: Prior(0.8, 400),
    Kind.HUB: Prior(0.9, 100),
    Kind.BRANCH: Prior(0.5, 100),
    Kind.LAST_END: Prior(0.1, 100),
    Kind.LEFT: Prior(0.2, 200),
    Kind.INTERIOR: Prior(0.02, 100),
    Kind.CHECKPOINT: Prior(0.05, 100),
    Kind.PROMPT_END: Prior(0.05, 40),
    Kind.ASKED: Prior(0.999, 250),
    Kind.SOON: Prior(0.9, 100),
}


def step_of(age: int) -> int:
    """Return the index of the step that an age falls in."""
    octave = (age + 2).bit_length() - 1
    return min(2 * octave - 2 + ((age + 2) >> (octave - 1) & 1), STEPS - 1)


class Survival:
    """Observations of one kind of state, for each step of age: how often states were used, and how long watched."""

    def __init__(self, prior: Prior) -> None:
        risk = -log(1 - prior.share) / prior.within
        self._prior_watched = [
            PRIOR_LIVES * width * exp(-begin / (4 * prior.within))
            for begin, width in zip(BEGINS[:-1], WIDTHS, strict=True)
        ]
        self._prior_used = [
            watched * risk * exp(-begin / prior.within)
            for begin, watched in zip(BEGINS[:-1], self._prior_watched, strict=True)
        ]
        self._watched = [0.0] * STEPS
        self._used = [0.0] * STEPS
        # See `prospects`.
        self.indices: list[float] = []
        self.chances: list[float] = []
        self.conclude()

    def add(self, begin: int, end: int, used: bool) -> None:
        """Add an observation: a state was watched from age `begin` to `end`. used: whether it was used then."""
        first, last = step_of(begin), step_of(end)
        for step in range(first, last + 1):
            self._watched[step] += min(end + 1, BEGINS[step + 1]) - max(begin, BEGINS[step])
        self._used[last] += used

    def conclude(self) -> None:
        """Compute `indices` and `chances` from what was observed so far."""
        self.indices, self.chances = prospects(self.risks())

    def forget(self) -> None:
        """Let older observations weigh less."""
        self._watched = [REMEMBERED * time for time in self._watched]
        self._used = [REMEMBERED * count for count in self._used]

    def risks(self) -> list[float]:
        """Return the risk at each step of age: expected uses of one such state for each use of the pool."""
        counted = zip(self._used, self._prior_used, self._watched, self._prior_watched, strict=True)
        return [
            (used + prior_used) / (watched + prior_watched + 1e-9)
            for used, prior_used, watched, prior_watched in counted
        ]


def prospects(risks: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return, for a state that has reached each step of age unused, its index and the probability that it is ever used.

    The index is the best ratio, over all times that it may be kept, of the probability of a use in that time to the
    mean time until the use or the end of that time. Its unit is uses of the state for each use of the pool.
    """
    uses = [-expm1(-risk * width) for risk, width in zip(risks, WIDTHS, strict=True)]
    times = [use / risk if risk > 0 else width for use, risk, width in zip(uses, risks, WIDTHS, strict=True)]
    indices, chances, never = [0.0] * STEPS, [0.0] * STEPS, 1.0
    for start in range(STEPS - 1, -1, -1):
        never *= 1 - uses[start]  # the probability of no use from this step on
        chances[start] = 1 - never
        alive, used, time = 1.0, 0.0, 0.0
        for use, mean_time in zip(uses[start:], times[start:], strict=True):
            used += alive * use
            time += alive * mean_time
            alive *= 1 - use
            indices[start] = max(indices[start], used / time)
            if alive < NEGLIGIBLE:
                break
    return indices, chances


class Chances:
    """How likely states are to be used, by kind and age; learned from what becomes of each."""

    def __init__(self) -> None:
        self._survivals = {kind: Survival(PRIORS[kind]) for kind in Kind}
        self.learned = 0  # how often indices and chances have changed
        self._seen = dict.fromkeys(Kind, 0)  # observations since they were last computed

    def index(self, kind: Kind, age: int) -> float:
        """Return the expected uses for each use of the pool of a state that is kept for as long as that pays."""
        return self._survivals[kind].indices[step_of(age)]

    def chance(self, kind: Kind, age: int) -> float:
        """Return the probability that a state of this kind and age is ever used, if it is kept for ever."""
        return self._survivals[kind].chances[step_of(age)]

    def learn(self, kind: Kind, begin: int, end: int, used: bool) -> None:
        """Add an observation: a state was watched from age `begin` to `end`. used: whether it was used then."""
        survival = self._survivals[kind]
        survival.add(begin, end, used)
        self._seen[kind] += 1
        if self._seen[kind] >= LEARNED_AFTER:
            self._seen[kind] = 0
            survival.conclude()
            survival.forget()
            self.learned += 1
