"""Copies between the pools and host memory, on a stream of their own: steps do not wait for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from baton.actors.forward.device import Done, Pending
from baton.actors.forward.step.packing import ALIGNMENT, Inbox
from baton.actors.forward.streams import Event, Stream
from baton.actors.messages import Transferred
from baton.actors.storage.host_memory import HostState, HostStates
from baton.kernels.state_pool import gather, scatter
from baton.models.batch import Pools

MOST_STAGED = 1 << 25  # bytes
Keep: TypeAlias = Callable[[HostState | None], None]


class Transfers:
    """Each copy begins behind all that `stream` has been given, and nothing there waits for it.

    For that nobody may use its slot, its pages or its copy again before it has been collected. Nor has the stream to
    wait then: what the host has seen pass is over for every stream.
    """

    def __init__(self, pools: Pools, host: HostStates, stream: Stream) -> None:
        self._pools, self._host, self._stream = pools, host, stream
        self._copies = stream.beside()
        host.use(pools, self._copies.host_buffer)

    @property
    def aside(self) -> bool:
        return self._copies is not self._stream

    def export(self, key: int, slot: int, pages: Sequence[int], position: int) -> Pending[Transferred]:
        try:
            copy = self._host.room(position)
        except Exception:
            self._host.put(key, None)
            raise

        def enqueue() -> None:
            self._copies.download(self._pools.slots[slot], copy.state)
            for part in self._parts(copy.blocks):
                taken = gather(self._pools.blocks, self._uploaded(pages[part]))
                self._copies.download(taken, copy.blocks[part])

        return self._enqueued(enqueue, Transferred(key), copy, partial(self._host.put, key))

    def fill(self, grant: int, key: int, slot: int, pages: Sequence[int], first_page: int) -> Pending[Transferred]:
        copy = self._host.get(key)
        blocks = copy.blocks[first_page:]

        def enqueue() -> None:
            self._copies.upload(copy.state, self._pools.slots[slot])
            for part in self._parts(blocks):
                brought = torch.empty(blocks[part].shape, dtype=torch.uint8, device=self._pools.blocks.device)
                self._copies.upload(blocks[part], brought)
                scatter(self._pools.blocks, self._uploaded(pages[part]), brought)

        return self._enqueued(enqueue, Transferred(key, grant), copy)

    def _enqueued(
        self, enqueue: Callable[[], None], report: Transferred, copy: HostState, keep: Keep | None = None
    ) -> Pending[Transferred]:
        """One that fails half way is over when that half is: until then it may write to its slot."""
        self._copies.wait(self._stream.record())
        began, failed = self._copies.record(), None
        try:
            with self._copies.active(), torch.inference_mode():
                enqueue()
        except Exception as error:
            failed = error
        return EnqueuedTransfer(report, copy, began, self._copies.record(), keep, failed)

    def _parts(self, blocks: Tensor) -> Iterator[slice]:
        """Of some pages, for as much memory as the device is sure to have beside its pools."""
        step = max(MOST_STAGED // max(blocks.shape[1], 1), 1)
        return (slice(begin, min(begin + step, len(blocks))) for begin in range(0, len(blocks), step))

    def _uploaded(self, pages: Sequence[int]) -> Tensor:
        """int64, on the device."""
        inbox = Inbox(torch.int64.itemsize * len(pages) + ALIGNMENT, self._pools.blocks.device, self._copies)
        packing = inbox.packing()
        section = packing.put(pages)
        inbox.send(packing)
        return inbox.view(section)


@dataclass(frozen=True, slots=True)
class EnqueuedTransfer:
    """A Pending. copy: what is written or read until it is over. keep: called with it then; with None if it failed.

    failed: why not all of it could be enqueued.
    """

    report: Transferred
    copy: HostState
    began: Event
    ended: Event
    keep: Keep | None
    failed: Exception | None

    def passed(self) -> bool:
        return self.ended.passed()

    def collect(self) -> Done[Transferred]:
        made = None
        try:
            self.ended.wait()
            if self.failed is not None:
                raise self.failed
            made = self.copy
        finally:
            if self.keep is not None:
                self.keep(made)
        return Done(self.report, self.ended.seconds_since(self.began))
