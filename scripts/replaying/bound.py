"""What nobody can do better: an upper bound of the tokens that any policy can reuse, which knows the future."""

from dataclasses import dataclass

import torch

from actors.cache.pages import PagePool
from actors.cache.radix import Node, RadixTree, path_to_root
from actors.tokens import Tokens, common_prefix, count, cut

WINDOWS = 64
ROUNDS = 400


@dataclass(frozen=True)
class Choice:
    """One way for a request to go on: from a state that was last at hand with request `since`, and saves `tokens`."""

    request: int
    since: int
    tokens: int


class Past:
    """All histories so far, and with which request each part of them came last."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.requests = self.tokens = 0
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
        known, limit = 0, count(prompt) - 1
        found: list[Choice] = []
        while known < limit and (child := node.children.get(cut(prompt, known, known + 1))):
            known += common_prefix(child.tokens, cut(prompt, known, known + count(child.tokens)))
            if found and found[-1].since == child.used:
                found.pop()
            found.append(Choice(self.requests, child.used, min(known, limit)))
            if known < child.end:
                break
            node = child
        self.choices += found

    def frontiers(self) -> float:
        """How many states are waiting to be used at a time, if each request goes on from the deepest."""
        deepest = {choice.request: choice for choice in self.choices}
        return sum(choice.request - choice.since for choice in deepest.values()) / max(self.requests, 1)

    def bound(self, slots: int) -> float:
        """The share of the prompts' tokens that is reused at best.

        A slot holds one state at a time, so a use takes a slot from `since` until then. Were slots to be hired at
        some price, each request would take its best choice or none, by itself; what they gain, with the hire of all
        slots, is a bound whatever the prices (the Lagrangian dual), and the least over prices a good one. The price
        varies by window of time.
        """
        if not self.choices:
            return 0.0
        request = torch.tensor([choice.request for choice in self.choices])
        begin = torch.tensor([choice.since for choice in self.choices], dtype=torch.double) / self.requests * WINDOWS
        end = torch.tensor([choice.request for choice in self.choices], dtype=torch.double) / self.requests * WINDOWS
        saved = torch.tensor([choice.tokens for choice in self.choices], dtype=torch.double)
        held = torch.stack([overlap(begin, end, window) for window in range(WINDOWS)], 1)
        scale = self.tokens / self.requests
        price = torch.full([WINDOWS], -3.0, dtype=torch.double, requires_grad=True)
        optimizer = torch.optim.Adam([price], lr=0.1)
        least = float(torch.zeros(self.requests + 1, dtype=torch.double).index_reduce(0, request, saved, "amax").sum())
        for _ in range(ROUNDS):
            optimizer.zero_grad()
            hire = price.exp() * scale * self.requests / WINDOWS
            gain = (saved - held @ hire).clamp(min=0)
            best = torch.zeros(self.requests + 1, dtype=torch.double).index_reduce(0, request, gain, "amax")
            total = best.sum() + slots * hire.sum()
            least = min(least, float(total.detach()))
            (total / self.tokens).backward()
            optimizer.step()
        return least / self.tokens


def overlap(begin: torch.Tensor, end: torch.Tensor, window: int) -> torch.Tensor:
    """How much of a window each stretch covers."""
    return (end.clamp(max=window + 1) - begin.clamp(min=window)).clamp(min=0)
