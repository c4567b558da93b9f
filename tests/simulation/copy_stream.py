"""The hash device's second stream: copies to and from host memory, in order, beside its steps."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class EnqueuedCopy:
    """fills: whether it writes its slot and pages, else it reads them. released: what it waits for has been done."""

    key: int
    slot: int
    pages: list[int]
    fills: bool
    carry_out: Callable[[], None]
    released: bool = False


class CopyStream:
    """due: when the oldest copy is done; None if there is none, or it waits for the other stream."""

    def __init__(self, duration: Callable[[], float]) -> None:
        self.enqueued: deque[EnqueuedCopy] = deque()
        self.now = 0.0
        self.due: float | None = None
        self._duration = duration

    def enqueue(self, copy: EnqueuedCopy) -> None:
        self.enqueued.append(copy)

    def release(self, copy: EnqueuedCopy) -> None:
        """The other stream has come to the place that this copy waits for."""
        copy.released = True
        self._begin()

    def execute(self) -> None:
        self.due = None
        self.enqueued.popleft().carry_out()
        self._begin()

    def drain(self) -> None:
        while self.enqueued:
            self.execute()

    def uses_slot(self, slot: int) -> bool:
        return any(copy.slot == slot for copy in self.enqueued)

    def uses_page(self, page: int) -> bool:
        return any(page in copy.pages for copy in self.enqueued)

    def uses_key(self, key: int) -> bool:
        return any(copy.key == key for copy in self.enqueued)

    def fills_slot(self, slot: int) -> bool:
        return any(copy.slot == slot for copy in self.enqueued if copy.fills)

    def _begin(self) -> None:
        if self.due is None and self.enqueued and self.enqueued[0].released:
            self.due = self.now + self._duration()
