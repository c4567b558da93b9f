"""The hash model as a device in plain Python: calls are executed late and in stream order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import mul
from typing import Any

from baton.actors.forward.contained import ContainedDevice
from baton.actors.forward.device import Work, WorkDraft, WorkMask
from baton.actors.forward.launching import Pending
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request, RowLogprobs, RowPooled, TokenLogprob
from baton.actors.tokens import pack, unpack
from baton.models.hash_definition import FOLD_PERIOD, MODULUS, next_state
from tests.simulation.copy_stream import CopyStream, EnqueuedCopy
from tests.simulation.execution import Execution, InjectedFault
from tests.simulation.hash_oracle import ANY, draw_token
from tests.simulation.toy_grammar import unpack_mask

GARBAGE = -1
SCRIBBLE, CALL, STEP = range(3)
WEIGHTS = [position % FOLD_PERIOD + 1 for position in range(4 * FOLD_PERIOD)]


class DeviceError(AssertionError):
    """A use of the device that no correct ring would make."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A state in host memory, and the KV entries of the tokens it has consumed (none without attention)."""

    state: int
    entries: tuple[int, ...]
    position: int
    first: int = 0  # the position of the first entry; the copy has no earlier ones


class Row:
    """A row, as the device stores it."""

    __slots__ = (
        "grant",
        "places",
        "pooled",
        "request",
        "slot",
        "tokens",
    )  # `tokens` are those fed, and the one to feed next

    def __init__(self, grant: int, slot: int, request: Request) -> None:
        self.grant = grant
        self.slot = slot
        self.request = request
        self.tokens = unpack(request.tokens)
        self.pooled = 0  # sum of the states that the request pools, so far
        self.places: list[int] = []  # index of each position's entry in the page pool


class HashDevice:
    """A device that stores states and KV entries as numbers, and checks how the ring uses them.

    It raises DeviceError at once for:
    - a write to a slot or an entry that the tree names;
    - freeing a slot or a page that a step in flight uses;
    - with a copy stream, any other use of a copy's slot, pages or key before the copy is complete.
    """

    def __init__(
        self,
        slots: int,
        pages: int,
        page_size: int,
        deliver: Callable[[Ran | Transferred], None],
        duration: Callable[[bool], float] = lambda step: 0.0,
        fault: Callable[[int, list[tuple[Row, int, int]]], str] = lambda run, work: "",
        copy_duration: Callable[[], float] | None = None,
    ) -> None:
        self.states = [GARBAGE] * slots  # by slot
        self.entries = [GARBAGE] * (pages * page_size)  # KV entries of the page pool; empty without pages
        self.guarded_entries = bytearray(pages * page_size)  # 1 for each entry that the tree names
        self.guarded_slots: set[int] = set()  # slots of states that the tree keeps
        self.vault: dict[int, Copy] = {}  # copies in host memory, by key; the disk reads and writes them too
        self.exporting: set[int] = set()  # keys of copies to host memory that are still enqueued
        self.dropping: set[int] = set()  # keys of copies whose drop is still enqueued
        self.unmade: set[int] = set()  # keys of copies that could not be made
        self.page_size = page_size
        self.rows: dict[int, Row] = {}
        self.rings: dict[int, list[int]] = {}  # by row index: the drafts that were fed last
        # Enqueued calls that have not been executed: (kind, function, arguments).
        self.stream: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        # The stream of the copies; None if copies are made on the stream of the steps.
        self.copies = CopyStream(copy_duration) if copy_duration is not None else None
        self.now = 0.0
        self._due: float | None = None  # when the oldest call is done, if its masks have come; None if there is none
        self.runs = 0  # number of steps executed so far
        self.passed = 0  # number of the last executed step, as its Work names it
        self.bad_launches: set[int] = set()  # the runs of steps that fail before their late masks come
        self.failed_early = 0  # number of steps that did
        self.failed_alone: set[str] = set()  # requests that failed in a step without other rows
        self._unfilled: set[int] = set()  # grants whose fill failed
        self._duration = duration
        self._fault = fault
        self._deliver = deliver
        self._has_run = False
        self.predict: Callable[[Row, int], list[int]] = lambda row, count: []  # tokens that a head predicts for a row
        self.calls = Execution(self)
        self._contained = ContainedDevice(self.calls, lambda error: isinstance(error, InjectedFault))
        # Slot and pages of each row, as of the last enqueued call.
        self._opened: dict[int, tuple[int, list[int]]] = {}
        self._steps: deque[tuple[set[int], list[int]]] = deque()  # slots and rows of each enqueued step

    # Calls of forward

    @property
    def copies_aside(self) -> bool:
        return self.copies is not None

    def clear(self, slot: int) -> None:
        self._enqueue(self._contained.clear, slot)

    def copy(self, source: int, target: int) -> None:
        self._enqueue(self._contained.copy, source, target)

    def copy_page(self, source: int, target: int) -> None:
        self._enqueue(self._contained.copy_page, source, target)

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        if key in self.exporting or key in self.vault:
            raise DeviceError(f"there is a copy {key} already")
        self.exporting.add(key)
        copy = partial(self._contained.export, key, slot, list(pages), position)
        self._transfer(EnqueuedCopy(key, slot, list(pages), False, partial(self._carry_out, copy)))

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first: int) -> None:
        copy = partial(self._contained.fill, grant, key, slot, list(pages), first)
        self._transfer(EnqueuedCopy(key, slot, list(pages), True, partial(self._carry_out, copy)))

    def _transfer(self, copy: EnqueuedCopy) -> None:
        """Enqueue a copy: on the only stream, or on the copy stream, where it waits for the calls enqueued so far."""
        if self.copies is None:
            self._enqueue(copy.carry_out)
        else:
            self.copies.enqueue(copy)
            self._enqueue(self.copies.release, copy)

    def _carry_out(self, copy: Callable[[], Pending[Transferred]]) -> None:
        report = copy().collect().report
        if report.error and report.grant is not None:
            self._unfilled.add(report.grant)
        self._deliver(report)

    def drop(self, key: int) -> None:
        if self.copies is not None and self.copies.uses_key(key):
            raise DeviceError(f"copy {key} is dropped while it is made or read")
        self.dropping.add(key)
        self._enqueue(self._contained.drop, key)

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self._opened[row] = (slot, list(pages))
        self._enqueue(self._contained.open_row, row, grant, slot, request, list(pages))

    def extend_row(self, row: int, pages: list[int]) -> None:
        self._opened[row][1].extend(pages)
        self._enqueue(self._contained.extend_row, row, pages)

    def run(self, work: Work) -> None:
        """Enqueue a step. Its slots and pages must not be freed before it has been executed."""
        rows = [*(chunk.row for chunk in work.chunks), *work.decodes]
        slots = {self._opened[row][0] for row in [*rows, *(commit.row for commit in work.commits)]}
        slots |= {checkpoint.slot for checkpoint in work.checkpoints}
        if self.copies is not None and any(map(self.copies.fills_slot, slots)):
            raise DeviceError(f"step {work.step} has a row that is still being filled")
        self._steps.append((slots, rows))
        self._enqueue(self._step, work, kind=STEP)

    # Called when a slot or a page is freed

    def scribble_slot(self, slot: int) -> None:
        """Overwrite a freed slot, in stream order. Raises DeviceError if a step or a copy in flight uses the slot."""
        for slots, _ in self._steps:
            if slot in slots:
                raise DeviceError(f"slot {slot} is freed while a step that uses it is in flight")
        if self.copies is not None and self.copies.uses_slot(slot):
            raise DeviceError(f"slot {slot} is freed while it is copied to or from host memory")
        self._scribble(self.states.__setitem__, slot, GARBAGE)

    def scribble_page(self, page: int) -> None:
        """Overwrite a freed page, in stream order. Raises DeviceError if a step or a copy in flight uses the page."""
        begin = page * self.page_size
        self.guarded_entries[begin : begin + self.page_size] = bytes(self.page_size)
        for _, rows in self._steps:
            if any(page in self._opened[row][1] for row in rows):
                raise DeviceError(f"page {page} is freed while a step that uses it is in flight")
        if self.copies is not None and self.copies.uses_page(page):
            raise DeviceError(f"page {page} is freed while it is copied to or from host memory")
        self._scribble(self._scribble_page, page)

    def reset(self) -> None:
        """Drain the streams and overwrite all memory, so that the next unit cannot rely on old content."""
        self.drain()
        self.states[:] = [GARBAGE] * len(self.states)
        self.entries[:] = [GARBAGE] * len(self.entries)
        self.guarded_entries[:] = bytes(len(self.guarded_entries))
        self.guarded_slots.clear()
        self.vault.clear()
        self.unmade.clear()
        self._unfilled.clear()
        self.rows.clear()
        self.passed = 0

    # Execution

    @property
    def due(self) -> float | None:
        """When the oldest call is done; None if there is none, or if it is a step whose late masks have not come."""
        is_ready = self._late is None or self._late.done() or self.runs + 1 in self.bad_launches
        return self._due if is_ready else None

    @property
    def _late(self) -> Future[list[WorkMask]] | None:
        """The late masks that the oldest call waits for; None if it has none."""
        kind, _, arguments = self.stream[0] if self.stream else (CALL, None, ())
        return arguments[0].late if kind == STEP else None

    def drain(self) -> None:
        """Execute all calls. As at the end of the device's thread, late masks that have not come never will."""
        while self.stream:
            if self._late is not None and not self._late.done():
                self._late.set_result([])
            self.execute()
        if self.copies is not None:
            self.copies.drain()

    def execute(self) -> None:
        """Execute the oldest call, and then the overwriting of slots and pages that was enqueued right after it."""
        _, call, arguments = self.stream.popleft()
        call(*arguments)
        while self.stream and self.stream[0][0] == SCRIBBLE:
            _, call, arguments = self.stream.popleft()
            call(*arguments)
        self._due = self._after(self._due or 0.0) if self.stream else None

    def _enqueue(self, call: Callable[..., None], *arguments: Any, kind: int = CALL) -> None:
        self.stream.append((kind, call, arguments))
        if self._due is None:
            self._due = self._after(self.now)

    def _scribble(self, call: Callable[..., None], *arguments: Any) -> None:
        if self.stream:
            self.stream.append((SCRIBBLE, call, arguments))
        else:
            call(*arguments)

    def _after(self, start: float) -> float:
        """Return when the oldest call of the stream will be done, if it starts at `start`."""
        return start + self._duration(self.stream[0][0] == STEP)

    def _write(self, slot: int, state: int) -> None:
        if slot in self.guarded_slots:
            raise DeviceError(f"slot {slot} is overwritten while the tree keeps it")
        self.states[slot] = state

    def _copy(self, source: int, target: int) -> None:
        self._write(target, self.states[source])

    def _copy_page(self, source: int, target: int) -> None:
        for offset in range(self.page_size):
            self._append(target * self.page_size + offset, self.entries[source * self.page_size + offset])

    def _export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        state, entries = self.states[slot], self._entries(pages, position)
        if GARBAGE in (state, *entries):
            raise DeviceError(f"copy {key} of slot {slot} and pages {pages} is of what was freed or never written")
        self.vault[key] = Copy(state, entries, position)

    def _entries(self, pages: list[int], position: int) -> tuple[int, ...]:
        if not self.entries:
            return ()
        size = self.page_size
        if len(pages) * size < position:
            raise DeviceError(f"pages {pages} do not cover {position} tokens")
        return tuple(self.entries[pages[at // size] * size + at % size] for at in range(position))

    def _fill(self, key: int, slot: int, pages: list[int], first: int) -> None:
        copy, size = self._copy_of(key), self.page_size
        self._write(slot, copy.state)
        if first * size < copy.first:
            raise DeviceError(
                f"copy {key} has no entries before {copy.first}, and the grant needs those from {first * size}"
            )
        if copy.entries and (first + len(pages)) * size < copy.position:
            raise DeviceError(f"copy {key} at {copy.position} does not fit into {pages} from page {first} on")
        for at in range(first * size, copy.first + len(copy.entries)):
            self._append(pages[at // size - first] * size + at % size, copy.entries[at - copy.first])

    def _drop(self, key: int) -> None:
        self.dropping.remove(key)
        if key not in self.unmade:
            self._copy_of(key)
            del self.vault[key]

    def _copy_of(self, key: int) -> Copy:
        if key not in self.vault:
            raise DeviceError(f"there is no copy {key}")
        return self.vault[key]

    def _append(self, place: int, entry: int) -> None:
        if self.guarded_entries[place]:
            raise DeviceError(f"page {place // self.page_size} is overwritten where the tree names it")
        self.entries[place] = entry

    def _scribble_page(self, page: int) -> None:
        begin = page * self.page_size
        self.entries[begin : begin + self.page_size] = [GARBAGE] * self.page_size

    def _open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self.rows[row] = Row(grant, slot, request)
        self._extend_row(row, pages)

    def _extend_row(self, row: int, pages: list[int]) -> None:
        size = self.page_size
        places = self.rows[row].places
        for page in pages:
            places += range(page * size, (page + 1) * size)

    def _step(self, work: Work) -> None:
        """Execute a step. It fails without being run if one of its rows could not be set up."""
        self.runs += 1
        self._steps.popleft()
        self.passed, self._has_run = work.step or self.passed, False
        ran = self._contained.launch(work).collect().report
        if not self._has_run:
            self._spoil(work, self._moved(work), "")
        self._deliver(ran)

    def _run(self, work: Work) -> Ran:
        """Run a step, or fail it if the scenario says so."""
        if work.late is not None and self.runs in self.bad_launches:
            self.failed_early += not work.late.done()
            raise InjectedFault("injected: launch")
        self._has_run = True
        moved = self._moved(work)
        if len(moved) == 1 and moved[0][0].grant in self._unfilled:
            self.failed_alone.add(moved[0][0].request.id)
        error = self._fault(self.runs, moved)
        return self._spoil(work, moved, error) if error else self._compute(work, moved)

    def _moved(self, work: Work) -> list[tuple[Row, int, int]]:
        moved = [(self.rows[chunk.row], chunk.start, chunk.stop) for chunk in work.chunks]
        drafts = {draft.row: len(draft.tokens) for draft in work.drafts}
        decodes = zip(work.decodes, work.positions, strict=True)
        return moved + [(self.rows[row], at, at + 1 + drafts.get(row, 0)) for row, at in decodes]

    def _compute(self, work: Work, moved: list[tuple[Row, int, int]]) -> Ran:
        """Feed each row its tokens, write the checkpoints, and draw a token for each row that is to draw one."""
        checkpoints: dict[int, dict[int, int]] = {}
        for checkpoint in work.checkpoints:
            checkpoints.setdefault(id(self.rows[checkpoint.row]), {})[checkpoint.position] = checkpoint.slot
        prompt_logprobs: list[RowLogprobs] = []
        pooled: list[RowPooled] = []
        for commit in work.commits:
            self._replay(commit.row, commit.replays, commit.position)
        for draft, at in _drafts(work):
            self._replay(draft.row, draft.replays, at)
        decoding = set(map(id, self._decoding(work)))
        for row, start, stop in moved:
            stop = start + 1 if id(row) in decoding else stop
            passed = self._consume(row, start, stop, checkpoints.pop(id(row), {}))
            if row.request.prompt_logprobs_from is not None:
                prompt_logprobs += _prompt_logprobs(row, row.request.prompt_logprobs_from, start, passed)
            if row.request.pooled is not None and not admitted_with_output(row.request):
                pooled += _pooled(row, row.request.pooled, start, passed)
        if checkpoints:
            raise DeviceError(f"checkpoints of rows that are not in the step: {work}")
        masks = self._masks(work)
        tokens, logprobs = list[int](), list[RowLogprobs]()
        fed = {id(self.rows[draft.row]): draft for draft in work.drafts}
        for row, stop in _sampling(work, moved):
            drawn = self._draws(row, stop, fed.get(id(row)), masks)
            tokens += [token for token, _ in drawn]
            if row.request.logprobs is not None:
                items = [TokenLogprob(token, float(state), []) for token, state in drawn]
                logprobs += [RowLogprobs(row.grant, stop + number, [item]) for number, item in enumerate(items)]
        if masks:
            raise DeviceError(f"masks of rows that draw nothing: {work}")
        predicted = self._predictions(work, {row.grant: stop for row, stop in _sampling(work, moved)})
        return Ran(work.step, pack(tokens), logprobs, prompt_logprobs, predicted=predicted, pooled=pooled)

    def _masks(self, work: Work) -> dict[int, list[list[int]]]:
        """Return the tokens that rows may draw, by grant. A row that has ended has no late mask, and may draw any."""
        masks = {self.rows[mask.row].grant: list(map(unpack_mask, (mask.words, *mask.ahead))) for mask in work.masks}
        if work.late is None:
            return masks
        rows = [row for row, _ in _sampling(work, self._moved(work)) if row.request.grammar and row.grant not in masks]
        late = {self.rows[mask.row].grant: [unpack_mask(mask.words)] for mask in work.late.result(timeout=0)}
        if not late.keys() <= {row.grant for row in rows}:
            raise DeviceError(f"late masks of rows that need none: {work}")
        return masks | {row.grant: [ANY] for row in rows} | late

    def _predictions(self, work: Work, sampling: dict[int, int]) -> dict[int, list[int]]:
        """Predict tokens for rows that have just drawn. sampling: each row's first draw, by grant.

        Each predicted token takes the place of an entry, as its keys and values would in the pages of the head.
        """
        drafts, predicted = {draft.row: len(draft.tokens) for draft in work.drafts}, {}
        for prediction in work.predictions:
            row = self.rows[prediction.row]
            if row.grant not in sampling:
                raise DeviceError(f"tokens are predicted for {row.request.id}, which draws none")
            first = sampling[row.grant] + drafts.get(prediction.row, 0)
            places = row.places[first : first + prediction.tokens]
            if any(self.guarded_entries[place] for place in places):
                raise DeviceError(f"predictions for {row.request.id} are written where the tree names a page")
            predicted[prediction.row] = self.predict(row, len(places))
        return predicted

    def _decoding(self, work: Work) -> list[Row]:
        return [self.rows[row] for row in work.decodes]

    def _replay(self, index: int, replays: int, position: int) -> None:
        """Put accepted drafts of a row into its state, up to `position`."""
        row, ring = self.rows[index], self.rings.get(index, [])
        if not 0 <= replays <= len(ring):
            raise DeviceError(f"{row.request.id} replays {replays} drafts of {len(ring)}")
        state = self.states[row.slot]
        for place, token in enumerate(ring[:replays], start=position - replays):
            state = next_state(state, token, place)
        self._write(row.slot, state)

    def _draws(
        self, row: Row, length: int, draft: WorkDraft | None, masks: dict[int, list[list[int]]]
    ) -> list[tuple[int, int]]:
        """Draw a row's next token, and a token after each of its drafts. Return each with the state that it follows.

        The states after drafts are not stored. In its next step the row feeds its last valid draw; Work says which
        draws are valid.
        """
        if len(row.tokens) != length:
            raise DeviceError(f"{row.request.id} has {len(row.tokens)} tokens and samples after {length}")
        if bool(row.request.grammar) != (row.grant in masks):
            raise DeviceError(f"{row.request.id} has a grammar or a mask, and not both")
        state, drafts = self.states[row.slot], draft.tokens if draft else ()
        allowed = masks.pop(row.grant, [ANY] * (1 + len(drafts)))
        if len(allowed) != 1 + len(drafts):
            raise DeviceError(f"{row.request.id} has {len(allowed)} masks for {1 + len(drafts)} draws")
        drawn = [(self._sample(row, state, length, allowed[0]), state)]
        for place, token in enumerate(drafts, start=length):
            state = next_state(state, token, place)
            if self.entries:
                self._append(row.places[place], state)
            drawn.append((self._sample(row, state, place + 1, allowed[place + 1 - length]), state))
        if draft is not None:
            self.rings[draft.row] = list(drafts)
        right = takewhile(lambda pair: pair[0] == pair[1][0], zip(drafts, drawn, strict=False))
        row.tokens += [token for token, _ in drawn[: 1 + sum(1 for _ in right)]]
        return drawn

    def _consume(self, row: Row, start: int, stop: int, checkpoints: dict[int, int]) -> list[int]:
        """Feed tokens to a row, and return the state after each token. checkpoints: the slot for each position."""
        state, passed = self.states[row.slot], []
        for position in range(start, stop):
            state = next_state(state, row.tokens[position], position)
            passed.append(state)
            if self.entries:
                self._append(row.places[position], state)
            if position + 1 in checkpoints:
                self._write(checkpoints.pop(position + 1), state)
        self._write(row.slot, state)
        if checkpoints:
            raise DeviceError(f"{row.request.id} does not cross {checkpoints} on its way from {start} to {stop}")
        return passed

    def _sample(self, row: Row, state: int, length: int, allowed: Sequence[int]) -> int:
        """Draw a row's next token from a state and, with pages, from its entries at all `length` positions."""
        fold = 0
        if self.entries:
            fold = sum(map(mul, WEIGHTS[:length], map(self.entries.__getitem__, row.places))) % MODULUS
        return draw_token(state, fold, row.request.sampling, length, allowed)

    def _spoil(self, work: Work, moved: list[tuple[Row, int, int]], error: str) -> Ran:
        """Fail a step: fill everything that it should have written with garbage."""
        if len(moved) == 1:
            self.failed_alone.add(moved[0][0].request.id)
        for row, start, stop in moved:
            self._write(row.slot, GARBAGE)
            for place in row.places[start:stop]:
                self._append(place, GARBAGE)
        for commit in work.commits:
            self._write(self.rows[commit.row].slot, GARBAGE)
        for checkpoint in work.checkpoints:
            self._write(checkpoint.slot, GARBAGE)
        for row, _ in _sampling(work, moved):
            row.tokens.append(0)
        return Ran(work.step, b"", [], [], error=error)


def _sampling(work: Work, moved: list[tuple[Row, int, int]]) -> Iterator[tuple[Row, int]]:
    """Yield the rows that draw a token, in order, each with the number of tokens before the drawn one."""
    chunks = len(work.chunks)
    for index, (row, start, stop) in enumerate(moved):
        if index >= chunks:
            yield row, start + 1
        elif work.chunks[index].samples:
            yield row, stop


def _drafts(work: Work) -> Iterator[tuple[WorkDraft, int]]:
    """Yield the drafts of each row with the position of the token that the row feeds first."""
    at = dict(zip(work.decodes, work.positions, strict=True))
    return ((draft, at[draft.row]) for draft in work.drafts)


def _prompt_logprobs(row: Row, begin: int, start: int, passed: list[int]) -> Iterator[RowLogprobs]:
    """Yield the log probabilities of the prompt tokens that follow the tokens fed from `start` on.

    The log probability of a token is defined as the hash model's state before it.
    """
    if begin == 0 and start == 0:
        yield RowLogprobs(row.grant, 0, [TokenLogprob(row.tokens[0], None, [])])
    first, last = max(start + 1, begin), min(start + len(passed) + 1, row.request.prompt_len)
    if first < last:
        items = [TokenLogprob(row.tokens[at], float(passed[at - 1 - start]), []) for at in range(first, last)]
        yield RowLogprobs(row.grant, first, items)


def admitted_with_output(request: Request) -> bool:
    """Return whether the request had output when it was admitted: then its prompt has already been reported."""
    return len(unpack(request.tokens)) > request.prompt_len


def _pooled(row: Row, span: tuple[int, int], start: int, passed: list[int]) -> Iterator[RowPooled]:
    """Add those states that the request pools to the row's sum; yield the sum when it is complete.

    span: the positions that the request pools. passed: the states after the tokens fed from `start` on.
    The sum of the hash model's states stands for the mean of hidden states.
    """
    begin, end = span
    first, stop = max(begin, start), min(end, start + len(passed))
    row.pooled += sum(passed[at - start] for at in range(first, stop))
    if first < stop == end:
        yield RowPooled(row.grant, str(row.pooled).encode())
