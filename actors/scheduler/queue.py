"""The requests that wait for a row, and the order in which they get one."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from baton.actors.requests import Request, RetireReason


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that has been accepted and has not got its final answer (Over or Ended)."""

    request: Request
    arrival: int  # the request's number in the order of arrival, which a retraction does not change
    grant: int | None = None  # the grant of the open Acquire or of the row, if there is one
    predecessor: int | None = None  # the grant of the request's last row, after that row is retired
    admitted: bool = False  # the request has a row, or its row is retired and neither Requeue nor Over has come
    suspect_until: int = 0  # a step failed at this position: up to it the request runs in steps of its own
    overtaken: int = 0  # how often the request's Acquires were overtaken in the cache, as in Refused
    ended_by: RetireReason | None = None  # aborted or timeout, if the request was ended early
    ended: bool = False  # Ended has been sent; if it went to results, Over has not come yet

    @property
    def order(self) -> tuple[int, int]:
        """The sort key (priority, arrival): lower runs first."""
        return self.request.priority, self.arrival

    @property
    def flow(self) -> str:
        return self.request.flow


# (priority, turn, arrival, flow, place): arrivals are unique, so the last two are never compared. `place` is the index
# among the flow's waiting requests.
Entry = tuple[int, int, int, str, int]


class Queue:
    """The requests that wait, in an order that is fair between flows (max-min fairness).

    A request's turn is the number of requests of its flow that have a row or wait ahead of it. The request with the
    lowest (priority, turn, arrival) is next. So flows that compete for rows get the same number of rows, however many
    requests each has sent, and no flow's first request waits for another flow's second.
    """

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()  # how many rows each flow has
        self._waiting: dict[str, list[OpenRequest]] = {}  # by flow, each list in the order of (priority, arrival)
        self._heads: list[Entry] = []  # the entry of each flow's first request, sorted
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Queue({list(self)!r})"

    def __iter__(self) -> Iterator[OpenRequest]:
        """Iterate in the order in which requests get a row."""
        return iter(self.first(self._length))

    def add(self, record: OpenRequest) -> None:
        waiting = self._take_head(record.flow)
        insort(waiting, record, key=lambda other: other.order)
        self._put_head(record.flow, waiting)
        self._length += 1

    def remove(self, record: OpenRequest) -> None:
        waiting = self._take_head(record.flow)
        removed = waiting.pop(bisect_left(waiting, record.order, key=lambda other: other.order))
        assert removed is record, "the request is not in the queue"
        self._put_head(record.flow, waiting)
        self._length -= 1

    def count_row(self, flow: str, change: int) -> None:
        """Note that a flow has got a row (1) or lost one (-1), which changes the turns of its waiting requests."""
        waiting = self._take_head(flow)
        self.rows[flow] += change
        if not self.rows[flow]:
            del self.rows[flow]
        self._put_head(flow, waiting)

    def first(self, count: int) -> list[OpenRequest]:
        """Return the next `count` requests, in order: a merge of the flows' own lists.

        Takes O(count · log count), however long the queue is.
        """
        chosen: list[OpenRequest] = []
        # `seconds` is a heap with the next request of each flow whose head has been chosen.
        heads, seconds = iter(self._heads), list[Entry]()
        head = next(heads, None)
        while len(chosen) < count and (head is not None or seconds):
            if head is None or (seconds and seconds[0] < head):
                entry = heappop(seconds)
            else:
                entry, head = head, next(heads, None)
            *_, flow, place = entry
            chosen.append(self._waiting[flow][place])
            if place + 1 < len(self._waiting[flow]):
                heappush(seconds, self._entry(flow, place + 1))
        return chosen

    def _entry(self, flow: str, place: int) -> Entry:
        priority, arrival = self._waiting[flow][place].order
        return priority, self.rows[flow] + place, arrival, flow, place

    def _take_head(self, flow: str) -> list[OpenRequest]:
        """Remove a flow and its head entry, and return its requests. Put them back with `_put_head`, changed or not."""
        waiting = self._waiting.pop(flow, [])
        if waiting:
            priority, arrival = waiting[0].order
            del self._heads[bisect_left(self._heads, (priority, self.rows[flow], arrival))]
        return waiting

    def _put_head(self, flow: str, waiting: list[OpenRequest]) -> None:
        """Put back a flow that `_take_head` removed, with a head entry for its present requests and rows."""
        if waiting:
            self._waiting[flow] = waiting
            insort(self._heads, self._entry(flow, 0))
