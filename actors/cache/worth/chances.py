"""What a kept state is worth: how soon somebody is likely to go on from it, times what that saves, over its bytes.

How soon is learned while serving, for each kind of state and by its age, as the risk of a survival analysis: uses in
an age over the time that states were watched in it (the estimator of life tables; Kaplan and Meier, 1958). From these
follows an index for a state of some age: the best ratio, over all times that it may be kept from now, of the chance of
a use in that time to the expected time until then (Gittins, 1979). Whoever always drops the state whose index times
saving is least keeps what pays best for its room (for caches: Beckmann, Chen and Cidon, LHD, NSDI 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, log

from baton.actors.kinds import Kind

STEPS = 40
# Ages in uses of the pool: the steps begin at 0, 1, 2, 4, 6, 10, 14, 22, …, two in each octave.
BEGINS = tuple((2 << step // 2) + (1 << step // 2) * (step % 2) - 2 for step in range(STEPS + 1))
WIDTHS = tuple(BEGINS[step + 1] - BEGINS[step] for step in range(STEPS))
LEARNED_AFTER = 64
REMEMBERED = 0.97
PRIOR_LIVES = 8
NEGLIGIBLE = 1e-3


@dataclass(frozen=True, slots=True)
class Prior:
    """Before anything is learned: the share of such states that is used again, and their mean age then, in uses."""

    share: float
    within: float


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
    """The step that an age falls in."""
    octave = (age + 2).bit_length() - 1
    return min(2 * octave - 2 + ((age + 2) >> (octave - 1) & 1), STEPS - 1)


class Survival:
    """Of states of one kind, by steps of their age: how often they were used, and how long they were watched."""

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
        self.indices: list[float] = []
        self.chances: list[float] = []
        self.conclude()

    def add(self, begin: int, end: int, used: bool) -> None:
        """One was watched from one age through another, and then used, or not watched any more."""
        first, last = step_of(begin), step_of(end)
        for step in range(first, last + 1):
            self._watched[step] += min(end + 1, BEGINS[step + 1]) - max(begin, BEGINS[step])
        self._used[last] += used

    def conclude(self) -> None:
        """What follows, by step of the age: indices, in uses of one in a use of the pool, and chances of any use."""
        self.indices, self.chances = prospects(self.risks())

    def forget(self) -> None:
        """Let what is new weigh more."""
        self._watched = [REMEMBERED * time for time in self._watched]
        self._used = [REMEMBERED * count for count in self._used]

    def risks(self) -> list[float]:
        """Uses of one in a use of the pool, by step of the age."""
        counted = zip(self._used, self._prior_used, self._watched, self._prior_watched, strict=True)
        return [
            (used + prior_used) / (watched + prior_watched + 1e-9)
            for used, prior_used, watched, prior_watched in counted
        ]


def prospects(risks: Sequence[float]) -> tuple[list[float], list[float]]:
    """By step, for one that comes to it unused: the best ratio of a use, and the chance of any use.

    The ratio is that of the chance of a use in some time to the mean time until it or the end of that time.
    """
    uses = [-expm1(-risk * width) for risk, width in zip(risks, WIDTHS, strict=True)]
    times = [use / risk if risk > 0 else width for use, risk, width in zip(uses, risks, WIDTHS, strict=True)]
    indices, chances, never = [0.0] * STEPS, [0.0] * STEPS, 1.0
    for start in range(STEPS - 1, -1, -1):
        never *= 1 - uses[start]
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
    """How likely states are to be used, by kind and age; learned from what becomes of each.

    learned: how often something else has followed from it.
    """

    def __init__(self) -> None:
        self._survivals = {kind: Survival(PRIORS[kind]) for kind in Kind}
        self.learned = 0
        self._seen = dict.fromkeys(Kind, 0)

    def index(self, kind: Kind, age: int) -> float:
        """Uses in a use of the pool, if one of this kind and age is kept as long as it pays."""
        return self._survivals[kind].indices[step_of(age)]

    def chance(self, kind: Kind, age: int) -> float:
        """Of any use, if it is kept for ever."""
        return self._survivals[kind].chances[step_of(age)]

    def learn(self, kind: Kind, begin: int, end: int, used: bool) -> None:
        """What a state of this kind has come to, watched from one age to another."""
        survival = self._survivals[kind]
        survival.add(begin, end, used)
        self._seen[kind] += 1
        if self._seen[kind] >= LEARNED_AFTER:
            self._seen[kind] = 0
            survival.conclude()
            survival.forget()
            self.learned += 1
