"""Copies of states in host memory, by key: made by the device's thread, written and read by the disk's."""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from models.batch import Pools


@dataclass(frozen=True, slots=True)
class HostState:
    """A state in host memory, with the KV of the `position` tokens that it has consumed.

    state: uint8, all of a slot as it lies in the pool. kv: one [position, ...] for each page tensor.
    ready: the event after which they are complete; None if they are so already.
    """

    position: int
    state: Tensor
    kv: list[Tensor]
    ready: torch.cuda.Event | None = None


class HostStates:
    """Safe between threads. A copy that could not be made is None."""

    def __init__(self) -> None:
        self._states: dict[int, HostState | None] = {}
        self._complete = False
        self._changed = threading.Condition()

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
            state = self._states.get(key)
        if state is None:
            return None
        if state.ready is not None:
            state.ready.synchronize()
        return state


def export(pools: Pools, slot: int, pages: list[int], position: int) -> HostState:
    """Enqueue the copy of a slot, and of the KV of `position` tokens in `pages`, to host memory."""
    device = pools.slots.device
    state = _to_host(pools.slots[slot])
    index = torch.tensor(pages, dtype=torch.int64, device=device)
    kv = [_to_host(tensor[index].flatten(0, 1)[:position]) for tensor in pools.pages]
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))
    return HostState(position, state, kv, ready)


def fill(pools: Pools, slot: int, pages: list[int], first_page: int, copy: HostState) -> None:
    """Enqueue the copy of a state into a slot, and of its KV from page index `first_page` on into `pages`."""
    pools.slots[slot].copy_(copy.state, non_blocking=True)
    size = pools.page_size
    whole = copy.position // size
    index = torch.tensor(pages[: whole - first_page], dtype=torch.int64, device=pools.slots.device)
    for tensor, kv in zip(pools.pages, copy.kv, strict=True):
        if len(index):
            entries = kv[first_page * size : whole * size].view(len(index), size, *kv.shape[1:])
            tensor[index] = entries.to(tensor.device, non_blocking=True)
        tail = kv[whole * size :]
        if len(tail):
            tensor[pages[whole - first_page], : len(tail)].copy_(tail, non_blocking=True)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.clone()
    try:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # No more memory can be pinned; the copy takes longer.
        return tensor.cpu()
    return host.copy_(tensor, non_blocking=True)
