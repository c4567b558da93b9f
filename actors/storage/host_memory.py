"""The copies of states in host memory, by key. The device and the disk's thread put, read and drop them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.actors.storage.kv_layout import KvLayout
from baton.models.batch import Pools


@dataclass(frozen=True, slots=True)
class HostState:
    """A state in host memory, with the KV of the `position` tokens that it has consumed."""

    position: int
    state: Tensor  # uint8 [bytes of a slot], as in the pool
    blocks: Tensor  # uint8 [pages, bytes of a page], as in the pool, from `first_page` on
    first_page: int = 0


class HostStates:
    """The copies in host memory, safe to use from several threads."""

    def __init__(self) -> None:
        self._states: dict[int, HostState | None] = {}  # by key; None: the copy could not be made
        self._complete = False  # whether no further copy will be made
        self._changed = threading.Condition()

    def use(self, pools: Pools, buffer: Callable[[int], Tensor]) -> None:
        """Set the pools whose states are copied. Call it before the first copy.

        buffer: allocates uint8 [bytes] in host memory, to and from which the device can copy asynchronously
        """
        self._pools, self._buffer, self._layout = pools, buffer, KvLayout.of(pools)

    def room(self, position: int, first_page: int = 0) -> HostState:
        """Return an uninitialised copy for a state at `position`. Raise RuntimeError if it cannot be allocated.

        first_page: the copy is to have no KV of the pages before this one
        """
        count, width = self._pools.pages_for(position) - first_page, self._pools.blocks.shape[1]
        blocks = self._buffer(count * width).view(count, width)
        return HostState(position, self._buffer(self._pools.slots.shape[1]), blocks, first_page)

    def kv_of(self, copy: HostState) -> list[Tensor]:
        """Return a copy's KV by token, independent of the page size: a tensor [position, ...] for each page tensor."""
        return self._layout.by_token(copy.blocks, copy.position)

    def from_kv(self, position: int, state: Tensor, kv: list[Tensor]) -> HostState:
        """Return a copy made of a state and its KV by token. Raise ValueError if they do not fit this model."""
        copy = self.room(position)
        if state.dtype != torch.uint8 or state.shape != copy.state.shape:
            raise ValueError(f"a state of {state.dtype} {list(state.shape)} is not of this model")
        copy.state.numpy()[:] = state.numpy()
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
