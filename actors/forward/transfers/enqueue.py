"""Copies between the pools and host memory, on a stream of their own, so that steps do not wait for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from baton.actors.forward.launching import Done, Pending
from baton.actors.forward.step.packing import ALIGNMENT, Inbox
from baton.actors.forward.streams import Event, Stream
from baton.actors.messages import Transferred
from baton.actors.storage.host_memory import HostState, HostStates
from baton.actors.storage.kv_layout import numbered
from baton.kernels.state_pool import gather, scatter
from baton.models.batch import Pools

# Pages are gathered into a temporary tensor on the device, at most this many bytes at a time.
MOST_STAGED = 1 << 25
Keep: TypeAlias = Callable[[HostState | None], None]


class Transfers:
    """Copies of states and their KV to host memory (export) and back (fill).

    Each copy waits for everything that was enqueued on `stream` before it. Nothing on `stream` waits for a copy, so the
    slot, pages and host memory of a copy must not be reused before the copy has been collected. After that no stream
    needs to wait for the copy: an event that the host has seen pass is over for every stream.
    """

    def __init__(self, pools: Pools, host: HostStates, stream: Stream) -> None:
        self._pools, self._host, self._stream = pools, host, stream
        self._copies = stream.beside()
        host.use(pools, self._copies.host_buffer)

    @property
    def aside(self) -> bool:
        """Whether copies have a stream of their own, and so run alongside steps."""
        return self._copies is not self._stream

    def export(self, key: int, slot: int, pages: Sequence[int], position: int) -> Pending[Transferred]:
        """Enqueue a copy to host memory: see Device."""
        try:
            copy = self._host.room(position)
        except Exception:
            self._host.put(key, None)  # report the failure to whatever waits for this copy
            raise

        def enqueue() -> None:
            for part, piece in self._pieces(slot, copy):
                self._copies.download(part, piece)
            for first, block in self._blocks(copy, 0):
                staged = gather(self._pools.blocks, self._uploaded(pages[first : first + len(block)]))
                self._copies.download(staged, block)

        return self._enqueued(enqueue, Transferred(key), copy, partial(self._host.put, key))

    def fill(self, grant: int, key: int, slot: int, pages: Sequence[int], first_page: int) -> Pending[Transferred]:
        """Enqueue a copy from host memory: see Device."""
        copy = self._host.get(key)
        absent = first_page - copy.first_page  # leading pages of the copy that the grant has already

        def enqueue() -> None:
            for part, piece in self._pieces(slot, copy):
                self._copies.upload(piece, part)
            for first, block in self._blocks(copy, absent):
                staged = torch.empty(block.shape, dtype=torch.uint8, device=self._pools.blocks.device)
                self._copies.upload(block, staged)
                begin = first - absent
                scatter(self._pools.blocks, self._uploaded(pages[begin : begin + len(block)]), staged)

        return self._enqueued(enqueue, Transferred(key, grant), copy)

    def _enqueued(
        self, enqueue: Callable[[], None], report: Transferred, copy: HostState, keep: Keep | None = None
    ) -> Pending[Transferred]:
        """Enqueue a copy, to start after everything that is on the stream of the steps now.

        If enqueueing fails half way, `collect` waits for the enqueued half, which may use the slot, and raises.
        """
        self._copies.wait(self._stream.record())
        began, failed = self._copies.record(), None
        try:
            with self._copies.active(), torch.inference_mode():
                enqueue()
        except Exception as error:
            failed = error
        return EnqueuedTransfer(report, copy, began, self._copies.record(), keep, failed)

    def _pieces(self, slot: int, copy: HostState) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of a slot, each with the piece of the copy that is for it."""
        begin = 0
        for piece in copy.state:
            yield self._pools.slots[slot, begin : begin + len(piece)], piece
            begin += len(piece)

    def _blocks(self, copy: HostState, first_page: int) -> Iterator[tuple[int, Tensor]]:
        """Yield a copy's pages from `first_page` on in parts, each with the index of its first page.

        A part has at most MOST_STAGED bytes, or one page if a page is larger.
        """
        step = max(MOST_STAGED // max(self._pools.blocks.shape[1], 1), 1)
        for first, block in numbered(copy.blocks):
            for begin in range(max(first_page - first, 0), len(block), step):
                yield first + begin, block[begin : begin + step]

    def _uploaded(self, pages: Sequence[int]) -> Tensor:
        """Upload page numbers. Return them as int64 on the device."""
        inbox = Inbox(torch.int64.itemsize * len(pages) + ALIGNMENT, self._pools.blocks.device, self._copies)
        on_device = inbox.put(pages)
        inbox.send()
        return on_device


@dataclass(frozen=True, slots=True)
class EnqueuedTransfer:
    """The Pending of a copy."""

    report: Transferred
    copy: HostState  # the host memory that is written or read
    began: Event
    ended: Event
    keep: Keep | None  # called with `copy` when the transfer is over, or with None if it failed
    failed: Exception | None  # why the copy could not be enqueued completely

    def passed(self) -> bool:
        return self.ended.passed()

    def collect(self) -> Done[Transferred]:
        complete = None
        try:
            self.ended.wait()
            if self.failed is not None:
                raise self.failed
            complete = self.copy
        finally:
            if self.keep is not None:
                self.keep(complete)
        return Done(self.report, self.ended.seconds_since(self.began))
