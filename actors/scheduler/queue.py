"""The requests without a row, and the order in which they get one."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from baton.actors.requests import Request, RetireReason


@dataclass(eq=False, slots=True)
class OpenRequest:
    """An open request. `grant` is its Acquire or its admission under way; `predecessor` the last one that was open.

    suspect_until: a step of this request failed at that position; up to there it runs in steps of its own. overtaken:
    how often it was in the cache, as that counts. ended: it is answered, by results, which has not said yet that it is
    over.
    """

    request: Request
    arrival: int
    grant: int | None = None
    predecessor: int | None = None
    admitted: bool = False
    suspect_until: int = 0
    overtaken: int = 0
    ended_by: RetireReason | None = None
    ended: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Lower runs first: priority, then arrival."""
        return self.request.priority, self.arrival

    @property
    def flow(self) -> str:
        return self.request.flow


# Priority, turn, arrival; then, not compared any more, the flow and the place among its waiting requests.
Entry = tuple[int, int, int, str, int]


class Queue:
    """The requests that wait, as many flows in which each has its turn.

    A request's turn is the number of those before it in its flow: all that have a row, and those that wait ahead of
    it. The lowest (priority, turn, arrival) is next. So flows that want more rows than there are get equally many,
    however many requests one of them has sent, and nobody's first waits for another's second: max-min fairness.
    """

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self._waiting: dict[str, list[OpenRequest]] = {}
        self._heads: list[Entry] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Queue({list(self)!r})"

    def __iter__(self) -> Iterator[OpenRequest]:
        """In their order."""
        return iter(self.first(self._length))

    def add(self, record: OpenRequest) -> None:
        waiting = self._take_head(record.flow)
        insort(waiting, record, key=lambda other: other.order)
        self._put_head(record.flow, waiting)
        self._length += 1

    def remove(self, record: OpenRequest) -> None:
        waiting = self._take_head(record.flow)
        removed = waiting.pop(bisect_left(waiting, record.order, key=lambda other: other.order))
        assert removed is record, "it does not wait"
        self._put_head(record.flow, waiting)
        self._length -= 1

    def count_row(self, flow: str, change: int) -> None:
        """One of the flow's has got a row (1), or has lost it (-1)."""
        waiting = self._take_head(flow)
        self.rows[flow] += change
        if not self.rows[flow]:
            del self.rows[flow]
        self._put_head(flow, waiting)

    def first(self, count: int) -> list[OpenRequest]:
        """Those that come next, in their order."""
        chosen: list[OpenRequest] = []
        heads, behind = iter(self._heads), list[Entry]()
        head = next(heads, None)
        while len(chosen) < count and (head is not None or behind):
            if head is None or (behind and behind[0] < head):
                entry = heappop(behind)
            else:
                entry, head = head, next(heads, None)
            *_, flow, place = entry
            chosen.append(self._waiting[flow][place])
            if place + 1 < len(self._waiting[flow]):
                heappush(behind, self._entry(flow, place + 1))
        return chosen

    def _entry(self, flow: str, place: int) -> Entry:
        priority, arrival = self._waiting[flow][place].order
        return priority, self.rows[flow] + place, arrival, flow, place

    def _take_head(self, flow: str) -> list[OpenRequest]:
        waiting = self._waiting.pop(flow, [])
        if waiting:
            priority, arrival = waiting[0].order
            del self._heads[bisect_left(self._heads, (priority, self.rows[flow], arrival))]
        return waiting

    def _put_head(self, flow: str, waiting: list[OpenRequest]) -> None:
        if waiting:
            self._waiting[flow] = waiting
            insort(self._heads, self._entry(flow, 0))
