"""Several virtual rings and a rule that chooses among them, as a router does."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from scripts.replaying.choices import Choice
from scripts.replaying.clock import Clock
from scripts.replaying.costs import Costs
from scripts.replaying.play import make_ring
from scripts.replaying.policies import POLICIES
from scripts.replaying.ring import Running, VirtualRing

LOOK_S = 0.1  # between reports of the engines


class VirtualFleet:
    """Rings with one clock, and the rule that chooses one for each request."""

    def __init__(self, rings: Sequence[VirtualRing], clock: Clock, choice: Choice) -> None:
        self.clock = clock
        self.rings, self._choice = rings, choice
        self.requests = [0] * len(rings)  # number of requests sent to each ring
        self._looks = False  # whether a look is scheduled

    @property
    def computed(self) -> int:
        return sum(ring.computed for ring in self.rings)

    @property
    def counters(self) -> Counter[str]:
        return sum((ring.counters for ring in self.rings), Counter[str]())

    @property
    def imbalance(self) -> float:
        """The busy time of the busiest device, as a multiple of the mean."""
        busy = [ring.device.busy for ring in self.rings]
        return max(busy) * len(busy) / sum(busy)

    def submit(self, running: Running) -> None:
        self._look()
        chosen = self._choice.choose(running.request)
        ended = running.ended

        def learn(running: Running) -> None:
            self._choice.ended(running)
            if ended is not None:
                ended(running)

        running.begun, running.ended = self._choice.begun, learn
        self.requests[chosen] += 1
        self.rings[chosen].submit(running)

    def run(self) -> None:
        self.clock.run(self._carry)

    def close(self) -> None:
        for ring in self.rings:
            ring.close()

    def _carry(self) -> None:
        for ring in self.rings:
            ring.carry()

    def _look(self) -> None:
        """Look at the engines from now on, until nothing else is scheduled."""
        if not self._looks:
            self._looks = True
            self.clock.at(self.clock.now + LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._looks = False
        self._choice.look()
        if self.clock.pending:
            self._look()


def make_fleet(count: int, slots: int, make_choice: Callable[[Sequence[VirtualRing]], Choice]) -> VirtualFleet:
    """Make a fleet. slots: of each engine."""
    clock = Clock()
    rings = [make_ring(POLICIES["worth"], slots, Costs(), clock=clock) for _ in range(count)]
    return VirtualFleet(rings, clock, make_choice(rings))


def make_one_engine(count: int, slots: int) -> VirtualRing:
    """Make one engine with the slots and the throughput of all engines of a fleet. Its steps take as long as theirs."""
    usual = Costs()
    quick = {name: getattr(usual, name) / count for name in ("prefill", "decode", "copy", "host")}
    return make_ring(POLICIES["worth"], count * slots, replace(usual, **quick), max_running=32 * count)
