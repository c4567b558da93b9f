"""An upper bound of the tokens that any policy can reuse, computed with knowledge of the future."""

from array import array

import numpy as np
import numpy.typing as npt

from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.tokens import Tokens, common_prefix, count, cut

WINDOWS = 64  # number of windows of time; each has its own price (see Past.bound)
ROUNDS = 400  # steps of Adam
STEP = 0.1  # learning rate of Adam, on the logarithm of the price

Floats = npt.NDArray[np.float64]


class Past:
    """All requests so far, as a radix tree; each node knows the last request that contained it.

    The class also notes the choices of each request. A choice is an earlier state from which the request can resume,
    with the number of tokens that this saves.
    """

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        # One entry for each choice: the request, the last earlier request that passed the state, and the tokens saved.
        self._choosers, self._since, self._saved = array("q"), array("q"), array("q")
        self._tree: RadixTree[None] = RadixTree(PagePool(0, 1))

    def add(self, salt: str, prompt: Tokens, answer: Tokens) -> None:
        """Add the next request and its answer, and note the request's choices."""
        self.requests += 1
        self.tokens += count(prompt)
        root = self._tree.match(salt, b"", 0).node
        self._choose(root, prompt)
        if prompt + answer:
            for step in path_to_root(self._tree.insert(root, prompt + answer, [])):
                step.used = self.requests

    def _choose(self, node: Node[None], prompt: Tokens) -> None:
        """Note a prompt's choices: for each earlier request, the deepest of the states that it was the last to pass.

        The other ones save fewer tokens, and would occupy a slot for as long.
        """
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
        """Return the mean number of states that wait to be used, if each request resumes from its deepest state."""
        deepest = dict(zip(self._choosers, self._since, strict=True))
        return sum(request - since for request, since in deepest.items()) / max(self.requests, 1)

    def bound(self, slots: int) -> float:
        """Return an upper bound of the share of prompt tokens that can be reused with this many slots.

        A slot holds one state at a time, so a reuse occupies a slot from the state's last use until the request.
        Suppose that slots are rented at a price per time. Then each request independently takes its best choice, or
        none. The sum of these gains, plus the rent of all slots, is an upper bound for any prices (the Lagrangian
        dual). Adam searches for prices, one for each window of time, that make this bound small.
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
            rent = np.exp(price) * self.tokens / WINDOWS
            gain = saved - (end.since_start(rent) - begin.since_start(rent))
            best = np.maximum.reduceat(gain, first).clip(min=0)
            least = min(least, float(best.sum() + slots * rent.sum()))
            chosen = (gain == np.repeat(best, choices)) & (gain > 0)
            slope = rent * (slots - (end.passed(chosen) - begin.passed(chosen))) / self.tokens
            mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
            price -= STEP * mean / (1 - 0.9**number) / (np.sqrt(square / (1 - 0.999**number)) + 1e-8)
        return least / self.tokens


class Moments:
    """Points in time, measured in windows since the start."""

    def __init__(self, at: Floats) -> None:
        self._window = at.astype(np.int64).clip(max=WINDOWS - 1)
        self._part = at - self._window

    def since_start(self, rates: Floats) -> Floats:
        """Return, for each point, the integral of the windows' rates from the start."""
        cost: Floats = (np.cumsum(rates) - rates)[self._window] + self._part * rates[self._window]
        return cost

    def passed(self, selected: npt.NDArray[np.bool_]) -> Floats:
        """Return, for each window, the part of the window before each selected point, summed over these points."""
        window = self._window[selected]
        ends = np.bincount(window, minlength=WINDOWS)
        whole: Floats = np.cumsum(ends[::-1])[::-1].astype(np.float64) - ends
        return whole + np.bincount(window, self._part[selected], WINDOWS)
