"""The hash device's second stream: it makes copies to and from host memory in order, concurrently with the steps."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class EnqueuedCopy:
    """A copy to or from host memory that is enqueued on the stream."""

    key: int  # the copy's key in host memory
    slot: int
    pages: list[int]
    fills: bool  # whether the copy writes to the slot and pages instead of reading them
    carry_out: Callable[[], None]
    released: bool = False  # the device calls that the copy waits for have been executed


class CopyStream:
    """A queue of copies. The oldest copy is made at its due time."""

    def __init__(self, duration: Callable[[], float]) -> None:
        self.enqueued: deque[EnqueuedCopy] = deque()
        self.now = 0.0
        self.due: float | None = None  # when the oldest copy is done; None without a released one
        self._duration = duration  # draws how long a copy takes

    def enqueue(self, copy: EnqueuedCopy) -> None:
        self.enqueued.append(copy)

    def release(self, copy: EnqueuedCopy) -> None:
        """Let a copy start: the stream of the steps has executed every call enqueued before it."""
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
