"""The hash model as a device: plain Python, executed late, in stream order, reading its arguments as it executes."""

from collections import deque
from collections.abc import Callable, Sequence

from actors.device import Work
from actors.messages import Ran, Request
from actors.tokens import pack, unpack
from models.hash_definition import fold_entries, next_state, next_token

GARBAGE = -1


class Row:
    def __init__(self, slot: int, request: Request, pages: list[int]) -> None:
        self.slot = slot
        self.tokens = unpack(request.tokens)
        self.pages = pages
        self.stop_ids = request.stops.token_ids


class HashDevice:
    """`stream` holds what has been enqueued and not executed; `execute` runs the oldest call."""

    def __init__(self, slots: int, pages: int, page_size: int, vocab_size: int, deliver: Callable[[Ran], None]) -> None:
        self.states = [GARBAGE] * slots
        self.entries = [[GARBAGE] * page_size for _ in range(pages)]
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        self.stream: deque[Callable[[], None]] = deque()
        self._deliver = deliver

    def execute(self) -> None:
        self.stream.popleft()()

    def clear(self, slot: int) -> None:
        self.stream.append(lambda: self.states.__setitem__(slot, 0))

    def copy(self, source: int, target: int) -> None:
        self.stream.append(lambda: self.states.__setitem__(target, self.states[source]))

    def copy_page(self, source: int, target: int) -> None:
        self.stream.append(lambda: self.entries.__setitem__(target, list(self.entries[source])))

    def scribble_slot(self, slot: int) -> None:
        """What a freed slot may be overwritten with at any time."""
        self.stream.append(lambda: self.states.__setitem__(slot, GARBAGE))

    def scribble_page(self, page: int) -> None:
        self.stream.append(lambda: self.entries.__setitem__(page, [GARBAGE] * self.page_size))

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self.stream.append(lambda: self.rows.__setitem__(row, Row(slot, request, list(pages))))

    def extend_row(self, row: int, pages: list[int]) -> None:
        self.stream.append(lambda: self.rows[row].pages.extend(pages))

    def run(self, work: Work) -> None:
        self.stream.append(lambda: self._run(work))

    def _run(self, work: Work) -> None:
        wanted = {(c.row, c.position): c.slot for c in work.checkpoints}
        sampled = []
        for chunk in work.chunks:
            row = self.rows[chunk.row]
            for position in range(chunk.start, chunk.stop):
                self._consume(chunk.row, row, position, wanted)
            if chunk.samples:
                sampled.append(self._sample(row, chunk.stop))
        for index, position in zip(work.decodes, work.positions, strict=True):
            self._consume(index, self.rows[index], position, wanted)
            sampled.append(self._sample(self.rows[index], position + 1))
        assert not wanted, f"checkpoints that no row of the step crossed: {wanted}"
        self._deliver(Ran(work.step, pack(sampled), [], []))

    def _consume(self, index: int, row: Row, position: int, wanted: dict[tuple[int, int], int]) -> None:
        state = next_state(self.states[row.slot], row.tokens[position], position)
        self.states[row.slot] = state
        if self.entries:
            self.entries[row.pages[position // self.page_size]][position % self.page_size] = state
        slot = wanted.pop((index, position + 1), None)
        if slot is not None:
            self.states[slot] = state

    def _sample(self, row: Row, length: int) -> int:
        fold = fold_entries(self.read(row.pages, length)) if self.entries else 0
        token = next_token(self.states[row.slot], fold, self.vocab_size)
        assert len(row.tokens) == length, f"a row of {len(row.tokens)} tokens samples behind {length}"
        row.tokens.append(token)
        return token

    def read(self, pages: Sequence[int], length: int) -> list[int]:
        """The entries of positions [0, length) through a page table."""
        return [self.entries[pages[at // self.page_size]][at % self.page_size] for at in range(length)]
