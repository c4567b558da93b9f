"""Forward: owns the device and the slots of all running requests. It executes its mailbox in order on one stream."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from actors.actor import Send
from actors.forward.device import Device, Work, WorkCheckpoint, WorkChunk
from actors.grants import Failure
from actors.lease import Lease
from actors.messages import (
    Admit,
    Admitted,
    Checkpoint,
    Copied,
    Drain,
    Drop,
    Export,
    Exported,
    Message,
    Ran,
    Retire,
    Retired,
    Step,
    Stepped,
    Unmade,
)
from actors.tokens import count, pack, unpack


@dataclass(slots=True)
class RunningRow:
    """A running request as its stream will have left it: `state` will have consumed `position` tokens."""

    index: int
    grant: int
    state: Lease
    position: int
    length: int


@dataclass(slots=True)
class LaunchedStep:
    """A step on the stream whose event has not passed; `sampling` in the order in which they sample.

    positions: where it brings each of its rows.
    """

    step: int
    sampling: list[int]
    positions: dict[int, int]
    checkpoints: list[Checkpoint]


@dataclass
class Forward:
    """The forward actor: it owns the device and the slots of running rows, and executes its mailbox in order.

    Reports to results leave in stream order: each waits until every step enqueued before it is done.
    max_running: how many rows the device has. rows: by grant.
    """

    send: Send
    device: Device
    max_running: int
    rows: dict[int, RunningRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free_rows = list(range(self.max_running - 1, -1, -1))
        self._poisoned: set[int] = set()
        self._reports: deque[LaunchedStep | Admitted | Stepped | Retired | Drain] = deque()

    def receive(self, message: Message) -> None:
        match message:
            case Admit():
                self._admit(message)
            case Step():
                self._step(message)
            case Retire():
                self._retire(message)
            case Ran():
                self._ran(message)
            case Export(key, state, pages, position):
                self.device.export(key, state.slot, pages, position)
                self.send("cache", Exported(key, state))
            case Unmade():
                self.send("cache", message)
            case Drop(keys):
                for key in keys:
                    self.device.drop(key)
            case Drain():
                self._reports.append(message)
            case _:
                raise TypeError(f"forward got {message!r}")

    def act(self) -> None:
        while self._reports and not isinstance(report := self._reports[0], LaunchedStep):
            self._reports.popleft()
            if isinstance(report, Retired):
                report.poisoned = report.grant in self._poisoned
                self._poisoned.discard(report.grant)
            self.send("results", report)

    def leases(self) -> Iterator[Lease]:
        yield from (row.state for row in self.rows.values())
        for report in self._reports:
            match report:
                case Retired():
                    yield report.state
                case LaunchedStep() | Stepped():
                    yield from (checkpoint.lease for checkpoint in report.checkpoints)
                case _:
                    pass

    def _admit(self, admit: Admit) -> None:
        row = RunningRow(self._free_rows.pop(), admit.grant, admit.state, admit.match, count(admit.request.tokens))
        self.rows[admit.grant] = row
        if admit.loan is not None:
            self.device.copy(admit.loan.slot, row.state.slot)
        elif admit.fill is not None:
            self.device.fill(
                admit.fill.key, row.state.slot, admit.pages[admit.fill.first_page :], admit.fill.first_page
            )
        elif not admit.moved:
            self.device.clear(row.state.slot)
        if admit.page_copy is not None:
            self.device.copy_page(admit.page_copy.source, admit.page_copy.target)
        if not (admit.loan is None and admit.page_copy is None and admit.fill is None):
            self.send("cache", Copied(admit.grant))
        self.device.open_row(row.index, admit.grant, row.state.slot, admit.request, admit.pages)
        self._reports.append(
            Admitted(admit.grant, admit.request, admit.match, admit.matched_tokens, admit.miss_reason, admit.origin)
        )

    def _step(self, step: Step) -> None:
        for given in step.pages:
            self.device.extend_row(self.rows[given.grant].index, given.pages)
        resting = {*step.sit_out, *(chunk.grant for chunk in step.chunks)}
        decodes = [row for row in self.rows.values() if row.position >= row.length and row.grant not in resting]
        positions = [row.position for row in decodes]
        chunks = [self._chunk(self.rows[chunk.grant], chunk.tokens) for chunk in step.chunks]
        for row in decodes:
            row.position += 1
        sampling = [chunk.grant for chunk, work in zip(step.chunks, chunks, strict=True) if work.samples]
        sampling += [row.grant for row in decodes]
        moved = {grant: self.rows[grant].position for grant in [*(c.grant for c in step.chunks), *sampling]}
        self._reports.append(LaunchedStep(step.step, sampling, moved, step.checkpoints))
        checkpoints = [WorkCheckpoint(self.rows[c.grant].index, c.position, c.lease.slot) for c in step.checkpoints]
        self.device.run(Work(step.step, chunks, [row.index for row in decodes], positions, checkpoints))

    def _chunk(self, row: RunningRow, tokens: int) -> WorkChunk:
        start, row.position = row.position, row.position + tokens
        return WorkChunk(row.index, start, row.position, row.position == row.length)

    def _retire(self, retire: Retire) -> None:
        row = self.rows.pop(retire.grant)
        self._free_rows.append(row.index)
        self._reports.append(Retired(retire.grant, retire.reason, row.state, row.position))

    def _ran(self, ran: Ran) -> None:
        """The oldest step on the stream is done. Rows of one that raised are worth nothing in the next one either."""
        at = next(i for i, report in enumerate(self._reports) if isinstance(report, LaunchedStep))
        running = self._reports[at]
        assert isinstance(running, LaunchedStep) and running.step == ran.step
        if ran.error:
            self._poisoned.update(running.positions)
        sampled = [] if ran.error else list(zip(running.sampling, unpack(ran.tokens), strict=True))
        sound = [(grant, token) for grant, token in sampled if grant not in self._poisoned]
        self._reports[at] = Stepped(
            ran.step,
            [grant for grant, _ in sound],
            pack(token for _, token in sound),
            running.checkpoints,
            [row for row in ran.logprobs if row.grant not in self._poisoned],
            [row for row in ran.prompt_logprobs if row.grant not in self._poisoned],
            [Failure(grant, to) for grant, to in running.positions.items() if grant in self._poisoned],
            ran.error,
        )
