"""Copies of states in host memory, by key: made and read by the device, and by the disk's thread."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.actors.storage.kv_layout import KvLayout
from baton.models.batch import Pools


@dataclass(frozen=True, slots=True)
class HostState:
    """A state in host memory, with the KV of the `position` tokens that it has consumed.

    state: uint8, all of a slot as it lies in the pool. blocks: uint8 [pages, bytes], the pages as they lie in theirs.
    """

    position: int
    state: Tensor
    blocks: Tensor


class HostStates:
    """Safe between threads. A copy that could not be made is None."""

    def __init__(self) -> None:
        self._states: dict[int, HostState | None] = {}
        self._complete = False
        self._changed = threading.Condition()

    def use(self, pools: Pools, buffer: Callable[[int], Tensor]) -> None:
        """Before the first copy. buffer: gives uint8 [bytes] in host memory, where the device copies by itself."""
        self._pools, self._buffer, self._layout = pools, buffer, KvLayout.of(pools)

    def room(self, position: int) -> HostState:
        """What a copy is to be written to. Raises RuntimeError if there is no memory."""
        count, width = self._pools.pages_for(position), self._pools.blocks.shape[1]
        blocks = self._buffer(count * width).view(count, width)
        return HostState(position, self._buffer(self._pools.slots.shape[1]), blocks)

    def kv_of(self, copy: HostState) -> list[Tensor]:
        """One [position, ...] for each page tensor, whatever the page size."""
        return self._layout.by_token(copy.blocks, copy.position)

    def from_kv(self, position: int, state: Tensor, kv: list[Tensor]) -> HostState:
        """Raises ValueError if these are not of this model."""
        copy = self.room(position)
        if state.dtype != torch.uint8 or state.shape != copy.state.shape:
            raise ValueError(f"a state of {state.dtype} {list(state.shape)} is not of this model")
        copy.state.numpy()[:] = state.numpy()
        self._layout.to_pages(kv, position, copy.blocks)
        return copy

    def put(self, key: int, state: HostState | None) -> None:
        with self._changed:
            self._states[key] = state
            self._changed.notify_all()

    def get(self, key: int) -> HostState:
        state = self._states[key]
        if state is None:
            raise KeyError(f"copy {key} could not be made")
        return state

    def drop(self, key: int) -> None:
        with self._changed:
            self._states.pop(key, None)

    def clear(self) -> None:
        with self._changed:
            self._states.clear()
            self._complete = False

    def complete(self) -> None:
        """No further copy will be made: whoever waits for one waits in vain."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def wait_for(self, key: int, seconds: float) -> HostState | None:
        """The copy as soon as it has been made; None if that takes longer, or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._states or self._complete, seconds)
            return self._states.get(key)
