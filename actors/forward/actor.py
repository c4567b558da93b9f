"""The forward actor: it owns the device and the slots of all running requests, and executes its mailbox in order."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.actors.actor import Send
from baton.actors.forward.device import DeviceQueue, Work, WorkCheckpoint, WorkChunk, WorkMask
from baton.actors.grants import Failure
from baton.actors.lease import Lease
from baton.actors.messages import (
    Admit,
    Admitted,
    Checkpoint,
    Copied,
    Drain,
    Drop,
    Export,
    Exported,
    Filled,
    Message,
    Ran,
    Retire,
    Retired,
    Step,
    Stepped,
    Transferred,
    Unmade,
)
from baton.actors.tokens import count, pack, unpack

NOT_FINITE = "what the model computed is not finite"


@dataclass(slots=True)
class RunningRow:
    """A running request, with the values that it will have after everything that has been enqueued."""

    index: int  # the row's index on the device
    grant: int
    state: Lease
    position: int  # tokens that the state will have consumed
    length: int  # tokens that the request was admitted with; after them the row decodes


@dataclass(slots=True)
class LaunchedStep:
    """A step on the stream whose event has not passed."""

    step: int
    sampling: list[int]  # grants that sample a token, in the order of Ran.tokens
    positions: dict[int, int]  # by grant: the row's position after the step; rows with chunks first
    checkpoints: list[Checkpoint]


@dataclass
class Forward:
    """The forward actor. Its mailbox order is the order of execution on the device's stream.

    Messages to results leave in the same order: each waits until every step enqueued before it is done.
    """

    send: Send
    device: DeviceQueue
    max_running: int  # how many rows the device has
    rows: dict[int, RunningRow] = field(default_factory=dict)  # by grant

    def __post_init__(self) -> None:
        self._free_rows = list(range(self.max_running - 1, -1, -1))
        self._poisoned: dict[int, str] = {}  # unusable states, by grant: why a fill failed, or "" after a failed step
        self._exporting: dict[int, Lease] = {}  # by key of the copy: the slot that is being copied
        self._filling: dict[int, Retired | None] = {}  # by grant being filled: the Retired to send after that, if any
        # Messages to results, in stream order. A LaunchedStep delays all messages after it until its Ran has come.
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
            case Export():
                self._export(message)
            case Transferred():
                self._transferred(message)
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
                # Set only now: a step that was enqueued before the retirement may have failed in the meantime.
                report.poisoned = self._poisoned.pop(report.grant, None) is not None
            self.send("results", report)

    def leases(self) -> Iterator[Lease]:
        yield from (row.state for row in self.rows.values())
        yield from self._exporting.values()
        yield from (retired.state for retired in self._filling.values() if retired is not None)
        for report in self._reports:
            match report:
                case Retired():
                    yield report.state
                case LaunchedStep() | Stepped():
                    yield from (checkpoint.lease for checkpoint in report.checkpoints)
                case _:
                    pass

    def _admit(self, admit: Admit) -> None:
        """Give a request a row, and enqueue the copies into its slot and page, or the clearing of the slot."""
        row = RunningRow(
            self._free_rows.pop(), admit.grant, admit.state, admit.hit.cached_tokens, count(admit.request.tokens)
        )
        self.rows[admit.grant] = row
        if admit.loan is not None:
            self.device.copy(admit.loan.slot, row.state.slot)
        elif admit.fill is not None:
            first, end = admit.fill.first_page, admit.fill.end_page
            self._filling[admit.grant] = None
            self.device.fill(admit.grant, admit.fill.key, row.state.slot, admit.pages[first:end], first)
        elif not admit.moved:
            self.device.clear(row.state.slot)
        if admit.page_copy is not None:
            self.device.copy_page(admit.page_copy.source, admit.page_copy.target)
        if not (admit.loan is None and admit.page_copy is None):
            self.send("cache", Copied(admit.grant))
        if admit.fill is not None and not self.device.copies_aside:
            self._filled(admit.grant)
        self.device.open_row(row.index, admit.grant, row.state.slot, admit.request, admit.pages)
        self._reports.append(Admitted(admit.grant, admit.request, admit.hit))

    def _step(self, step: Step) -> None:
        """Enqueue a step: its chunks, and all rows past their prompt except those that sit out."""
        for addition in step.pages:
            self.device.extend_row(self.rows[addition.grant].index, addition.pages)
        # A row that feeds a chunk does not also decode in this step, even if the chunk ends its prompt.
        not_decoding = {*step.sit_out, *(chunk.grant for chunk in step.chunks)}
        decodes = [row for row in self.rows.values() if row.position >= row.length and row.grant not in not_decoding]
        positions = [row.position for row in decodes]
        chunks = [self._chunk(self.rows[chunk.grant], chunk.tokens) for chunk in step.chunks]
        for row in decodes:
            row.position += 1
        sampling = [chunk.grant for chunk, work in zip(step.chunks, chunks, strict=True) if work.samples]
        sampling += [row.grant for row in decodes]
        moved = {grant: self.rows[grant].position for grant in [*(c.grant for c in step.chunks), *sampling]}
        self._reports.append(LaunchedStep(step.step, sampling, moved, step.checkpoints))
        checkpoints = [WorkCheckpoint(self.rows[c.grant].index, c.position, c.lease.slot) for c in step.checkpoints]
        masks = [WorkMask(self.rows[mask.grant].index, mask.words) for mask in step.masks]
        self.device.run(Work(step.step, chunks, [row.index for row in decodes], positions, checkpoints, masks))

    def _chunk(self, row: RunningRow, tokens: int) -> WorkChunk:
        start, row.position = row.position, row.position + tokens
        return WorkChunk(row.index, start, row.position, row.position == row.length)

    def _retire(self, retire: Retire) -> None:
        """Take a row off the device, and send Retired in stream order.

        If its slot is still being filled from host memory, Retired waits for that copy; other messages do not wait.
        """
        row = self.rows.pop(retire.grant)
        self._free_rows.append(row.index)
        retired = Retired(retire.grant, retire.reason, row.state, row.position)
        if retire.grant in self._filling:
            self._filling[retire.grant] = retired
        else:
            self._reports.append(retired)

    def _export(self, export: Export) -> None:
        """Enqueue a copy to host memory. With a single stream, later uses of the slot are ordered after it at once."""
        self._exporting[export.key] = export.state
        self.device.export(export.key, export.state.slot, export.pages, export.position)
        if not self.device.copies_aside:
            self._exported(export.key)

    def _exported(self, key: int) -> None:
        self.send("cache", Exported(key, self._exporting.pop(key)))

    def _filled(self, grant: int) -> None:
        self.send("cache", Copied(grant))
        self.send("scheduler", Filled(grant))

    def _transferred(self, done: Transferred) -> None:
        """Report the result of a copy. With a single stream, its success was reported when it was enqueued."""
        if done.grant is None:
            if self.device.copies_aside:
                self._exported(done.key)
            if done.error:
                self.send("cache", Unmade(done.key, done.error))
            return
        if done.error:
            self._poisoned[done.grant] = done.error
        if self.device.copies_aside:
            self._filled(done.grant)
        retired = self._filling.pop(done.grant)
        if retired is not None:
            self._reports.append(retired)

    def _ran(self, ran: Ran) -> None:
        """Replace the oldest LaunchedStep, which is done, by its Stepped message.

        A poisoned row stays poisoned until it is retired: one more step, already in flight, has used its state.
        """
        at = next(i for i, report in enumerate(self._reports) if isinstance(report, LaunchedStep))
        running = self._reports[at]
        assert isinstance(running, LaunchedStep) and running.step == ran.step
        grants = list(running.positions)  # grants with chunks come first, so that `unsound` can index them
        lost = [running.sampling[row] for row in ran.not_finite] + [grants[chunk] for chunk in ran.unsound]
        for grant in grants if ran.error else lost:
            self._poisoned.setdefault(grant, "")
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
            ran.error or NOT_FINITE * bool(lost) or self._unfilled(running),
        )

    def _unfilled(self, running: LaunchedStep) -> str:
        """Return why one of the step's rows could not be filled; "" if all were."""
        return next((why for grant in running.positions if (why := self._poisoned.get(grant))), "")
