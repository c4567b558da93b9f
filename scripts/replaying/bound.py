"""What nobody can do better: an upper bound of the tokens that any policy can reuse, which knows the future."""

from array import array

import numpy as np
import numpy.typing as npt

from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.tokens import Tokens, common_prefix, count, cut

WINDOWS = 64
ROUNDS = 400
STEP = 0.1

Floats = npt.NDArray[np.float64]


class Past:
    """All histories so far, and with which request each part of them came last.

    From it the choices of each request: it can go on from a state that was last at hand with another, and saves tokens.
    """

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self._choosers, self._since, self._saved = array("q"), array("q"), array("q")
        self._tree: RadixTree[None] = RadixTree(PagePool(0, 1))

    def add(self, salt: str, prompt: Tokens, answer: Tokens) -> None:
        """The next request."""
        self.requests += 1
        self.tokens += count(prompt)
        root = self._tree.match(salt, b"", 0).node
        self._choose(root, prompt)
        if prompt + answer:
            for step in path_to_root(self._tree.insert(root, prompt + answer, [])):
                step.used = self.requests

    def _choose(self, node: Node[None], prompt: Tokens) -> None:
        """Of two states that were at hand last with the same request, the deeper one."""
        known, limit = 0, count(prompt) - 1
        found: dict[int, int] = {}
        while known < limit and (child := node.children.get(cut(prompt, known, known + 1))):
            known += common_prefix(child.tokens, cut(prompt, known, known + count(child.tokens)))
            found[child.used] = min(known, limit)
            if known < child.end:
                break
            node = child
        self._choosers.extend([self.requests] * len(found))
        self._since.extend(found)
        self._saved.extend(found.values())

    def frontiers(self) -> float:
        """How many states are waiting to be used at a time, if each request goes on from the deepest."""
        deepest = dict(zip(self._choosers, self._since, strict=True))
        return sum(request - since for request, since in deepest.items()) / max(self.requests, 1)

    def bound(self, slots: int) -> float:
        """The share of the prompts' tokens that is reused at best.

        A slot holds one state at a time, so a use takes a slot from `since` until then. Were slots to be hired at
        some price, each request would take its best choice or none, by itself; what they gain, with the hire of all
        slots, is a bound whatever the prices (the Lagrangian dual), and the least over prices a good one. The price
        varies by window of time; Adam finds it.
        """
        if not self._choosers:
            return 0.0
        choosers, saved = np.array(self._choosers), np.array(self._saved, dtype=np.float64)
        begin, end = (Moments(np.array(each) / self.requests * WINDOWS) for each in (self._since, self._choosers))
        first = np.flatnonzero(np.diff(choosers, prepend=0))
        choices = np.diff(first, append=len(choosers))
        price = np.full(WINDOWS, -3.0)
        mean, square = np.zeros(WINDOWS), np.zeros(WINDOWS)
        least = float(np.maximum.reduceat(saved, first).sum())
        for number in range(1, ROUNDS + 1):
            hire = np.exp(price) * self.tokens / WINDOWS
            gain = saved - (end.since_start(hire) - begin.since_start(hire))
            best = np.maximum.reduceat(gain, first).clip(min=0)
            least = min(least, float(best.sum() + slots * hire.sum()))
            taken = (gain == np.repeat(best, choices)) & (gain > 0)
            slope = hire * (slots - (end.passed(taken) - begin.passed(taken))) / self.tokens
            mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
            price -= STEP * mean / (1 - 0.9**number) / (np.sqrt(square / (1 - 0.999**number)) + 1e-8)
        return least / self.tokens


class Moments:
    """Points in time, in windows since the start."""

    def __init__(self, at: Floats) -> None:
        self._window = at.astype(np.int64).clip(max=WINDOWS - 1)
        self._part = at - self._window

    def since_start(self, rates: Floats) -> Floats:
        """What each costs, at a rate for each window, from the start on."""
        cost: Floats = (np.cumsum(rates) - rates)[self._window] + self._part * rates[self._window]
        return cost

    def passed(self, those: npt.NDArray[np.bool_]) -> Floats:
        """How much of each window lies before those points, summed up."""
        window = self._window[those]
        ends = np.bincount(window, minlength=WINDOWS)
        behind: Floats = np.cumsum(ends[::-1])[::-1].astype(np.float64) - ends
        return behind + np.bincount(window, self._part[those], WINDOWS)
