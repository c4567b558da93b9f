"""The copies of states in host memory, by key. The device and the disk's thread put, read and drop them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.actors.storage.arena import Arena
from baton.actors.storage.kv_layout import KvLayout
from baton.actors.storage.lines import HostLines
from baton.models.batch import Pools


@dataclass(frozen=True, slots=True)
class HostState:
    """A state in host memory, with the KV of the `position` tokens that it has consumed."""

    position: int
    state: tuple[Tensor, ...]  # uint8 [bytes] each: together the bytes of a slot, as in the pool
    blocks: tuple[Tensor, ...]  # uint8 [pages, bytes of a page] each: consecutive pages, as in the pool
    first_page: int = 0  # `blocks` begins with this page


class HostStates:
    """The copies in host memory, safe to use from several threads."""

    def __init__(self, arena: Arena | None = None) -> None:
        """arena: the memory for copies; None: each copy is allocated when it is made"""
        self.arena = arena
        self._states: dict[int, HostState | None] = {}  # by key; None: the copy could not be made
        self._complete = False  # whether no further copy will be made
        self._changed = threading.Condition()

    def use(self, pools: Pools, buffer: Callable[[int], Tensor]) -> None:
        """Set the pools whose states are copied. Call it before the first copy.

        buffer: allocates uint8 [bytes] in host memory, to and from which the device can copy asynchronously. It is not
            called if there is an arena.
        """
        self._pools, self._layout = pools, KvLayout.of(pools)
        self._buffer = buffer if self.arena is None else ordinary_memory

    def room(self, position: int, first_page: int = 0) -> HostState:
        """Return an uninitialised copy for a state at `position`. Raise RuntimeError if it cannot be allocated.

        first_page: the copy is to have no KV of the pages before this one

        If the arena has too few lines, the copy takes ordinary memory, which the device copies to and from more slowly.
        The cache counts a copy's bytes as free when it sends Drop, so this may happen for the time until Drop is
        carried out, if another thread allocates meanwhile.
        """
        width, state = self._pools.blocks.shape[1], self._pools.slots.shape[1]
        count = self._pools.pages_for(position) - first_page
        if self.arena is not None and (free := self.arena.take(self.arena.lines.count(count))) is not None:
            return _in_lines(free, self.arena.lines, position, count, first_page)
        blocks = (self._buffer(count * width).view(count, width),) if count else ()
        return HostState(position, (self._buffer(state),), blocks, first_page)

    def state_of(self, copy: HostState) -> Tensor:
        """Return a copy's state in one piece, which may be the copy's own memory."""
        if len(copy.state) == 1:
            return copy.state[0]
        return torch.from_numpy(np.concatenate([piece.numpy() for piece in copy.state]))

    def kv_of(self, copy: HostState) -> list[Tensor]:
        """Return a copy's KV by token, independent of the page size: a tensor [position, ...] for each page tensor."""
        return self._layout.by_token(copy.blocks, copy.position)

    def from_kv(self, position: int, state: Tensor, kv: list[Tensor]) -> HostState:
        """Return a copy made of a state and its KV by token. Raise ValueError if they do not fit this model."""
        if state.dtype != torch.uint8 or state.shape != self._pools.slots.shape[1:]:
            raise ValueError(f"a state of {state.dtype} {list(state.shape)} is not of this model")
        copy, begin = self.room(position), 0
        for piece in copy.state:
            piece.numpy()[:] = state.numpy()[begin : begin + len(piece)]
            begin += len(piece)
        self._layout.to_pages(kv, position, copy.blocks)
        return copy

    def put(self, key: int, state: HostState | None) -> None:
        """Store a copy under `key`. state: the copy, or None if it could not be made."""
        with self._changed:
            self._states[key] = state
            self._changed.notify_all()

    def get(self, key: int) -> HostState:
        """Return the copy under `key`. Raise KeyError if there is none, or if it could not be made."""
        state = self._states[key]
        if state is None:
            raise KeyError(f"copy {key} could not be made")
        return state

    def drop(self, key: int) -> None:
        with self._changed:
            self._states.pop(key, None)

    def clear(self) -> None:
        """Drop every copy. After this, `wait_for` waits for new copies again."""
        with self._changed:
            self._states.clear()
            self._complete = False

    def complete(self) -> None:
        """Note that no further copy will be made, so that no `wait_for` waits any longer."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def wait_for(self, key: int, seconds: float) -> HostState | None:
        """Wait up to `seconds` for a copy to be made and return it; None if it was not made by then, or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._states or self._complete, seconds)
            return self._states.get(key)


def ordinary_memory(nbytes: int) -> Tensor:
    """Allocate uint8 [bytes] that the operating system may move or swap out."""
    return torch.empty(nbytes, dtype=torch.uint8)


def _in_lines(memory: list[Tensor], lines: HostLines, position: int, pages: int, first_page: int) -> HostState:
    """Return a copy for a state and `pages` pages in lines of `memory`."""
    state = [line[: lines.state_bytes - at * lines.nbytes] for at, line in enumerate(memory[: lines.state])]
    blocks = [
        line[: lines.page_bytes * min(lines.pages, pages - at * lines.pages)].view(-1, lines.page_bytes)
        for at, line in enumerate(memory[lines.state :])
    ]
    return HostState(position, tuple(state), tuple(blocks), first_page)
