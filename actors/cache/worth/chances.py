"""How likely a cached state is to be used, and how soon: learned while serving, by kind of state and by age.

Ages are counted in *uses of the pool* (any state is used or stored), and divided into *age steps*. For each kind and
age step a *risk* is estimated: the uses of such states in the age step, divided by the time that such states were
watched in it (the estimator of life tables; Kaplan and Meier, 1958). The risks give each kind and age an *index*
(Gittins, 1979). To compute it, consider every length of time for which the state could be kept from now on. Divide the
probability of a use in that time by the expected time until the use, or until the end of that time if there is none.
The index is the largest of these ratios. A cache that always evicts the state with the least index × saving ÷ size
keeps the states that pay best (compare LHD: Beckmann, Chen and Cidon, NSDI 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, log

from baton.actors.kinds import Kind

STEPS = 40
# The age at which each age step begins: 0, 1, 2, 4, 6, 10, 14, 22, …; two age steps in each octave.
BEGINS = tuple((2 << step // 2) + (1 << step // 2) * (step % 2) - 2 for step in range(STEPS + 1))
WIDTHS = tuple(BEGINS[step + 1] - BEGINS[step] for step in range(STEPS))
LEARNED_AFTER = 64  # number of observations of a kind after which its indices are computed again
REMEMBERED = 0.97  # the weight of older observations is multiplied by this each time that the indices are computed
PRIOR_LIVES = 8  # the prior counts as much as this many observed states
NEGLIGIBLE = 1e-3  # times that a state stays unused with less than this probability are not considered


@dataclass(frozen=True, slots=True)
class Prior:
    """The assumption about a kind of state before anything is learned."""

    share: float  # the share of such states that are used again
    within: float  # the mean age of such a state at its next use, in uses of the pool


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
    """Return the number of the age step that contains `age`."""
    octave = (age + 2).bit_length() - 1
    return min(2 * octave - 2 + ((age + 2) >> (octave - 1) & 1), STEPS - 1)


class Survival:
    """Observations of one kind of state: how often states were used, and how long they were watched, by age step."""

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
        """Add an observation: a state was watched from age `begin` to `end`. used: whether it was used at `end`."""
        first, last = step_of(begin), step_of(end)
        for step in range(first, last + 1):
            self._watched[step] += min(end + 1, BEGINS[step + 1]) - max(begin, BEGINS[step])
        self._used[last] += used

    def conclude(self) -> None:
        """Compute `indices` and `chances` from what was observed so far."""
        self.indices, self.chances = prospects(self.risks())

    def forget(self) -> None:
        """Reduce the weight of all observations so far."""
        self._watched = [REMEMBERED * time for time in self._watched]
        self._used = [REMEMBERED * count for count in self._used]

    def risks(self) -> list[float]:
        """Return the risk at each age step: the expected uses of one such state per use of the pool."""
        counted = zip(self._used, self._prior_used, self._watched, self._prior_watched, strict=True)
        return [
            (used + prior_used) / (watched + prior_watched + 1e-9)
            for used, prior_used, watched, prior_watched in counted
        ]


def prospects(risks: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return two lists by age step: the index of a state that reaches it unused, and the probability of any later use.

    The index is defined in the module's docstring. Its unit is uses of the state per use of the pool.

    risks: the risk at each age step
    """
    uses = [-expm1(-risk * width) for risk, width in zip(risks, WIDTHS, strict=True)]
    times = [use / risk if risk > 0 else width for use, risk, width in zip(uses, risks, WIDTHS, strict=True)]
    indices, chances, never = [0.0] * STEPS, [0.0] * STEPS, 1.0
    for start in range(STEPS - 1, -1, -1):
        never *= 1 - uses[start]  # the probability of no use from this age step on
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
    """Estimates of how likely states are to be used, by kind and age; learned from observations of states."""

    def __init__(self) -> None:
        self._survivals = {kind: Survival(PRIORS[kind]) for kind in Kind}
        self.learned = 0  # how often indices and chances have changed
        self._seen = dict.fromkeys(Kind, 0)  # observations of each kind since its indices were last computed

    def index(self, kind: Kind, age: int) -> float:
        """Return the expected uses of a state per use of the pool, if the state is kept for as long as that pays."""
        return self._survivals[kind].indices[step_of(age)]

    def chance(self, kind: Kind, age: int) -> float:
        """Return the probability that a state of this kind and age is ever used, if it is kept for ever."""
        return self._survivals[kind].chances[step_of(age)]

    def learn(self, kind: Kind, begin: int, end: int, used: bool) -> None:
        """Add an observation: a state was watched from age `begin` to `end`. used: whether it was used at `end`."""
        survival = self._survivals[kind]
        survival.add(begin, end, used)
        self._seen[kind] += 1
        if self._seen[kind] >= LEARNED_AFTER:
            self._seen[kind] = 0
            survival.conclude()
            survival.forget()
            self.learned += 1
