"""The forward actor: it owns the device and the slots of all running requests, and executes its mailbox in order."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import takewhile

from baton.actors.actor import Send
from baton.actors.forward.device import (
    DeviceQueue,
    Work,
    WorkCheckpoint,
    WorkChunk,
    WorkCommit,
    WorkDraft,
    WorkMask,
    WorkPrediction,
)
from baton.actors.grants import Chunk, Failure, RowDrafts, RowMask
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
    StepMasks,
    Stepped,
    Transferred,
    Unmade,
)
from baton.actors.tokens import count, pack, unpack

NOT_FINITE = "what the model computed is not finite"
NOT_DRAWN = -1  # stands for a token that was not drawn, because the logits were not finite


@dataclass(slots=True)
class RunningRow:
    """A running request, with the values that it will have after everything that has been enqueued."""

    index: int  # the row's index on the device
    grant: int
    state: Lease
    position: int  # tokens that the state will have consumed
    length: int  # tokens that the request was admitted with; after them the row decodes
    accepted: int = 0  # drafts accepted in the row's last step, which the state has not consumed


@dataclass(slots=True)
class LaunchedStep:
    """A step on the stream whose event has not passed."""

    step: int
    sampling: list[int]  # grants that sample a token, in the order of Ran.tokens; those with drafts sample several
    positions: dict[int, int]  # by grant: the row's last position in the step; rows with chunks first
    checkpoints: list[Checkpoint]
    drafts: dict[int, list[int]]  # by grant: the drafts that the row feeds
    propose: int  # as in Step
    predicting: dict[int, int]  # by row index: the grants for which tokens are predicted


@dataclass(slots=True)
class LaunchedCommit:
    """A row that is gone, and accepted drafts that its state is about to consume on the stream."""

    retired: Retired


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
        # The late masks of the newest step that has any, and the rows that they are for, by grant.
        self._late: tuple[Future[list[WorkMask]], dict[int, int]] | None = None
        # Messages to results, in stream order. A launched step or commit delays all after it until its Ran has come.
        self._reports: deque[LaunchedStep | LaunchedCommit | Admitted | Stepped | Retired | Drain] = deque()

    def receive(self, message: Message) -> None:
        match message:
            case Admit():
                self._admit(message)
            case Step():
                self._step(message)
            case StepMasks(_, masks):
                self._mask(masks)
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
        while self._reports and not isinstance(report := self._reports[0], LaunchedStep | LaunchedCommit):
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
                case Retired(state=state) | LaunchedCommit(Retired(state=state)):
                    yield state
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
        drafts = {fed.grant: unpack(fed.tokens) for fed in step.drafts}
        # A row that feeds a chunk does not also decode in this step, even if the chunk ends its prompt.
        not_decoding = {*step.sit_out, *(chunk.grant for chunk in step.chunks)}
        decodes = [row for row in self.rows.values() if row.position >= row.length and row.grant not in not_decoding]
        positions = [row.position + row.accepted for row in decodes]  # before the rows advance
        chunks = [self._chunk(self.rows[chunk.grant], chunk.tokens) for chunk in step.chunks]
        feeds = [self._advance(row, drafts.get(row.grant, [])) for row in decodes]
        self._reports.append(self._launched(step, chunks, decodes, drafts))
        self.device.run(
            Work(
                step.step,
                chunks,
                decodes=[row.index for row in decodes],
                positions=positions,
                checkpoints=[WorkCheckpoint(self._index(c.grant), c.position, c.lease.slot) for c in step.checkpoints],
                masks=[WorkMask(self._index(mask.grant), mask.words, mask.ahead) for mask in step.masks],
                drafts=[feed for feed in feeds if feed.replays or feed.tokens],
                predictions=[WorkPrediction(self._index(chunk.grant), chunk.tokens) for chunk in step.predict],
                late=self._masks_to_come(step.late) if step.late else None,
            )
        )

    def _launched(
        self, step: Step, chunks: list[WorkChunk], decodes: list[RunningRow], drafts: dict[int, list[int]]
    ) -> LaunchedStep:
        """Return the record of a step whose rows have advanced."""
        sampling = [chunk.grant for chunk, work in zip(step.chunks, chunks, strict=True) if work.samples]
        sampling += [row.grant for row in decodes]
        ends = {grant: self.rows[grant].position for grant in [*(c.grant for c in step.chunks), *sampling]}
        for grant, tokens in drafts.items():
            ends[grant] += len(tokens)
        predicting = {self._index(chunk.grant): chunk.grant for chunk in step.predict}
        return LaunchedStep(step.step, sampling, ends, step.checkpoints, drafts, step.propose, predicting)

    def _masks_to_come(self, grants: list[int]) -> Future[list[WorkMask]]:
        """Return the future of the late masks of the step that is about to be launched."""
        come = Future[list[WorkMask]]()
        self._late = come, {grant: self._index(grant) for grant in grants}
        return come

    def _index(self, grant: int) -> int:
        return self.rows[grant].index

    def _mask(self, masks: list[RowMask]) -> None:
        """Pass its late masks to the newest step. Its rows may have been retired since, and their indices reused."""
        assert self._late is not None
        late, rows = self._late
        late.set_result([WorkMask(rows[mask.grant], mask.words) for mask in masks])

    def _advance(self, row: RunningRow, drafts: list[int]) -> WorkDraft:
        """Return the drafts that a row replays and feeds. Its state will have consumed none of the new ones."""
        feed = WorkDraft(row.index, row.accepted, tuple(drafts))
        row.position, row.accepted = row.position + row.accepted + 1, 0
        return feed

    def _chunk(self, row: RunningRow, tokens: int) -> WorkChunk:
        start, row.position = row.position, row.position + tokens
        return WorkChunk(row.index, start, row.position, row.position == row.length)

    def _retire(self, retire: Retire) -> None:
        """Take a row off the device, and send Retired in stream order.

        Its state first consumes accepted drafts, up to the position that the scheduler names. If its slot is still
        being filled from host memory, Retired waits for that copy; other messages do not wait.
        """
        row = self.rows.pop(retire.grant)
        self._free_rows.append(row.index)
        retired = Retired(retire.grant, retire.reason, row.state, retire.position)
        if replays := retire.position - row.position:
            self.device.run(Work(0, [], [], [], [], commits=[WorkCommit(row.index, replays, retire.position)]))
            self._reports.append(LaunchedCommit(retired))
        elif retire.grant in self._filling:
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
        """Replace the oldest launched step or commit, which is done, by its message."""
        at = next(i for i, report in enumerate(self._reports) if isinstance(report, LaunchedStep | LaunchedCommit))
        running = self._reports[at]
        if isinstance(running, LaunchedStep):
            assert running.step == ran.step
            self._reports[at] = self._stepped(running, ran)
        elif isinstance(running, LaunchedCommit):
            if ran.error:
                self._poisoned.setdefault(running.retired.grant, "")
            self._reports[at] = running.retired

    def _stepped(self, running: LaunchedStep, ran: Ran) -> Stepped:
        """Return the message of a step that is done, and note the accepted drafts of rows that are still here.

        A poisoned row stays poisoned until it is retired: one more step, already in flight, has used its state.
        """
        self._poisoned = ran.broken | self._poisoned
        drawing = replace(running, sampling=[grant for grant in running.sampling if grant not in ran.broken])
        valid = {} if ran.error else valid_draws(drawing, unpack(ran.tokens), ran.not_finite)
        # Grants with chunks come first, so that `unsound` can index them.
        grants = [grant for grant in running.positions if grant not in ran.broken]
        lost = [grant for grant, drawn in valid.items() if NOT_DRAWN in drawn]
        lost += [grants[chunk] for chunk in ran.unsound]
        for grant in grants if ran.error else lost:
            self._poisoned.setdefault(grant, "")
        sound = {grant: drawn for grant, drawn in valid.items() if grant not in self._poisoned}
        for grant in running.drafts:
            if grant in sound and grant in self.rows:
                self.rows[grant].accepted = len(sound[grant]) - 1
        predicting = running.predicting.items()
        predicted = {grant: ran.predicted[row] for row, grant in predicting if grant in sound and row in ran.predicted}
        return Stepped(
            ran.step,
            [grant for grant, drawn in sound.items() for _ in drawn],
            pack(token for drawn in sound.values() for token in drawn),
            running.checkpoints,
            [row for row in ran.logprobs if row.grant not in self._poisoned],
            [row for row in ran.prompt_logprobs if row.grant not in self._poisoned],
            [Failure(grant, to) for grant, to in running.positions.items() if grant in self._poisoned],
            ran.error or NOT_FINITE * bool(lost) or self._unfilled(running),
            [Chunk(grant, len(tokens)) for grant, tokens in running.drafts.items()],
            running.propose,
            [RowDrafts(grant, pack(tokens)) for grant, tokens in predicted.items()],
            [row for row in ran.pooled if row.grant not in self._poisoned],
        )

    def _unfilled(self, running: LaunchedStep) -> str:
        """Return why one of the step's rows could not be filled; "" if all were."""
        return next((why for grant in running.positions if (why := self._poisoned.get(grant))), "")


def valid_draws(step: LaunchedStep, tokens: list[int], not_finite: list[int]) -> dict[int, list[int]]:
    """Return the valid draws of each row that samples, by grant: see Work. NOT_DRAWN can only be the last of them.

    tokens: the draws of all rows. not_finite: the indices of those that were not drawn.
    """
    for index in not_finite:
        tokens[index] = NOT_DRAWN
    valid, begin = {}, 0
    for grant in step.sampling:
        drafts = step.drafts.get(grant, [])
        drawn = tokens[begin : begin + 1 + len(drafts)]
        begin += len(drawn)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, drawn, strict=False)))
        valid[grant] = drawn[: 1 + right]
    return valid
