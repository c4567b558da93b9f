"""Forward without the other actors: which calls it makes to the device, in which order, and when it reports."""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.actors.forward.actor import Forward
from baton.actors.forward.device import Work, WorkCheckpoint, WorkChunk, WorkCommit, WorkDraft, WorkMask, WorkPrediction
from baton.actors.grants import RowDrafts, RowMask
from baton.actors.lease import Lease, Ledger, Loan
from baton.actors.messages import (
    Admit,
    Admitted,
    Checkpoint,
    Chunk,
    Copied,
    Drain,
    Drop,
    Export,
    Exported,
    Failure,
    Fill,
    Filled,
    GrantPages,
    Message,
    PageCopy,
    Ran,
    Retire,
    Retired,
    Step,
    StepMasks,
    Stepped,
    Transferred,
    Unmade,
)
from baton.actors.requests import Hit, Request, RowLogprobs, Sampling, Stops
from baton.actors.tokens import pack, unpack


class NotedDevice:
    """A device that records each call: its name and its arguments."""

    copies_aside = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


class Bench:
    """A forward actor for two rows, and a list of the messages that it has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.device, self.ledger = NotedDevice(), Ledger(8)
        self.forward = Forward(lambda to, message: self.sent.append((to, message)), self.device, 2)  # type: ignore[arg-type]

    def lease(self) -> Lease:
        lease = self.ledger.take("forward")
        assert lease is not None
        return lease

    def admit(self, grant: int, length: int = 4, match: int = 0, pages: tuple[int, ...] = (), **more: Any) -> Request:
        request = Request(f"r{grant}", pack(range(length)), length, Sampling(), Stops(9))
        fields = {"moved": False, "loan": None, "pages": list(pages), "page_copy": None} | more
        self.receive(Admit(grant, request, self.lease(), Hit(match, match), **fields))
        return request

    def step(self, number: int, *chunks: Chunk, **more: Any) -> Work:
        fields = {"sit_out": [], "checkpoints": [], "pages": []} | more
        self.receive(Step(number, list(chunks), **fields))
        name, work = self.device.calls[-1]
        assert name == "run"
        return work

    def ran(self, number: int, *tokens: int, error: str = "", **more: Any) -> None:
        fields = {"logprobs": [], "prompt_logprobs": []} | more
        self.receive(Ran(number, pack(tokens), error=error, **fields))

    def receive(self, message: Message) -> None:
        self.forward.receive(message)
        self.forward.act()

    def of(self, kind: type) -> list:
        return [message for _, message in self.sent if isinstance(message, kind)]

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.device.calls]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.ledger.close()


def test_a_fresh_slot_is_cleared_and_nothing_was_copied(bench: Bench) -> None:
    request = bench.admit(1, pages=(3, 4))
    assert bench.device.calls == [("clear", 0), ("open_row", 0, 1, 0, request, [3, 4])]
    assert bench.sent == [("results", Admitted(1, request, Hit()))]


def test_a_slot_is_filled_from_a_loan_from_a_copy_or_not_at_all(bench: Bench) -> None:
    bench.admit(1, loan=Loan(5, 1), page_copy=PageCopy(7, 8))
    assert bench.device.calls[:2] == [("copy", 5, 0), ("copy_page", 7, 8)]
    bench.device.calls.clear()
    bench.admit(2, pages=(3, 4, 5), fill=Fill(9, 1, 2))
    assert bench.device.calls[0] == ("fill", 2, 9, 1, [4], 1), "no more than the copy has"
    assert [message.grant for message in bench.of(Copied)] == [1, 2]
    moved = Bench()
    moved.admit(1, moved=True)
    assert moved.names == ["open_row"] and not moved.of(Copied)
    moved.admit(2, page_copy=PageCopy(7, 8))
    assert [message.grant for message in moved.of(Copied)] == [2]
    moved.ledger.close()


def test_the_row_freed_last_is_reused_first(bench: Bench) -> None:
    for grant in (1, 2):
        bench.admit(grant)
    bench.receive(Retire(1, "aborted", 0))
    bench.admit(3)
    assert [call[1:3] for call in bench.device.calls if call[0] == "open_row"] == [(0, 1), (1, 2), (0, 3)]


def test_a_step_feeds_chunks_and_lets_those_past_their_prompt_decode(bench: Bench) -> None:
    bench.admit(1, match=2)
    bench.admit(2, length=3)
    assert bench.step(1, Chunk(1, 1), Chunk(2, 3)) == Work(
        1, [WorkChunk(0, 2, 3, False), WorkChunk(1, 0, 3, True)], [], [], []
    )
    checkpoint = Checkpoint(2, 4, bench.lease())
    work = bench.step(2, Chunk(1, 1), checkpoints=[checkpoint], pages=[GrantPages(2, [6])])
    assert bench.device.calls[-2] == ("extend_row", 1, [6])
    assert work == Work(2, [WorkChunk(0, 3, 4, True)], [1], [3], [WorkCheckpoint(1, 4, checkpoint.lease.slot)])
    assert bench.step(3, sit_out=[2]) == Work(3, [], [0], [4], [])
    assert bench.step(4) == Work(4, [], [0, 1], [5, 4], [])


def test_reports_leave_in_stream_order(bench: Bench) -> None:
    request = bench.admit(1, length=2)
    bench.step(1, Chunk(1, 2))
    bench.step(2)
    bench.receive(Retire(1, "finished", 3))
    bench.admit(2)
    bench.receive(Drain())
    assert bench.sent == [("results", Admitted(1, request, Hit()))]
    assert [lease.slot for lease in bench.forward.leases()] == [1, 0]
    bench.ran(1, 7)
    assert len(bench.sent) == 2
    bench.ran(2, 8)
    kinds = [type(message) for _, message in bench.sent]
    assert kinds == [Admitted, Stepped, Stepped, Retired, Admitted, Drain]
    assert [(step.step, step.grants, unpack(step.tokens)) for step in bench.of(Stepped)] == [
        (1, [1], [7]),
        (2, [1], [8]),
    ]
    [retired] = bench.of(Retired)
    assert (retired.grant, retired.reason, retired.position, retired.poisoned) == (1, "finished", 3, False)


def test_tokens_belong_to_sampling_rows_in_order(bench: Bench) -> None:
    bench.admit(1, length=2)
    bench.step(1, Chunk(1, 2))
    bench.admit(2)
    bench.step(2, Chunk(2, 4))
    bench.step(3)
    for number, tokens in ((1, [7]), (2, [8, 9]), (3, [5, 6])):
        bench.ran(number, *tokens)
    assert [(step.grants, unpack(step.tokens)) for step in bench.of(Stepped)] == [
        ([1], [7]),
        ([2, 1], [8, 9]),
        ([1, 2], [5, 6]),
    ]


def test_a_step_that_raised_poisons_its_rows_in_the_next_one_too(bench: Bench) -> None:
    bench.admit(1, length=2)
    bench.admit(2, length=2)
    bench.step(1, Chunk(1, 2))
    bench.step(2, Chunk(2, 1))
    held = Checkpoint(1, 4, bench.lease())
    bench.step(3, Chunk(2, 1), checkpoints=[held])
    bench.ran(1, error="a kernel failed")
    logprobs = [RowLogprobs(1, 3, []), RowLogprobs(2, 1, [])]
    bench.ran(2, 7, logprobs=logprobs, prompt_logprobs=logprobs)
    bench.ran(3, 8, 9)
    first, second, third = bench.of(Stepped)
    assert (first.grants, first.failed, first.error) == ([], [Failure(1, 2)], "a kernel failed")
    assert (second.grants, second.failed, second.error) == ([], [Failure(1, 3)], "")
    assert second.logprobs == second.prompt_logprobs == logprobs[1:]
    assert (third.grants, unpack(third.tokens), third.failed) == ([2], [8], [Failure(1, 4)])
    assert [checkpoint.position for checkpoint in third.checkpoints] == [4]
    for grant, position in ((1, 4), (2, 2)):
        bench.receive(Retire(grant, "failed", position))
    assert [retired.poisoned for retired in bench.of(Retired)] == [True, False]
    assert not vars(bench.forward)["_poisoned"]


def test_copies_to_and_from_host_memory(bench: Bench) -> None:
    state = bench.lease()
    bench.receive(Export(7, state, [1, 2], 9))
    bench.receive(Drop([3, 4]))
    assert bench.device.calls == [("export", 7, 0, [1, 2], 9), ("drop", 3), ("drop", 4)]
    assert [(to, message.key, message.state) for to, message in bench.sent] == [("cache", 7, state)]  # type: ignore[attr-defined]
    assert isinstance(bench.sent[0][1], Exported)
    bench.receive(Transferred(7, error="no memory"))
    assert bench.sent[1:] == [("cache", Unmade(7, "no memory"))]


def test_a_copy_on_its_own_stream_is_reported_when_it_is_made(bench: Bench) -> None:
    bench.device.copies_aside = True
    for key in (7, 8):
        bench.receive(Export(key, bench.lease(), [1, 2], 9))
    assert bench.sent == [] and [lease.slot for lease in bench.forward.leases()] == [0, 1]
    bench.receive(Transferred(7))
    bench.receive(Transferred(8, error="no memory"))
    assert [(type(message), message.key) for _, message in bench.sent] == [(Exported, 7), (Exported, 8), (Unmade, 8)]  # type: ignore[attr-defined]
    assert list(bench.forward.leases()) == []


def test_only_the_row_itself_waits_for_a_fill_on_its_own_stream(bench: Bench) -> None:
    bench.device.copies_aside = True
    bench.admit(1)
    bench.step(1, Chunk(1, 4))
    bench.admit(2, fill=Fill(9, 0, 0))
    assert bench.of(Copied) == bench.of(Filled) == []
    bench.receive(Retire(2, "aborted", 0))
    bench.ran(1, 7)
    assert [stepped.step for stepped in bench.of(Stepped)] == [1] and bench.of(Retired) == []
    assert [lease.slot for lease in bench.forward.leases()] == [0, 1]
    bench.receive(Transferred(9, 2))
    assert bench.of(Copied) == [Copied(2)] and bench.of(Filled) == [Filled(2)]
    assert [(retired.grant, retired.position, retired.poisoned) for retired in bench.of(Retired)] == [(2, 0, False)]


@pytest.mark.parametrize("aside", [True, False])
def test_a_row_that_could_not_be_filled_fails_alone(bench: Bench, aside: bool) -> None:
    bench.device.copies_aside = aside
    bench.admit(1)
    bench.admit(2, fill=Fill(9, 0, 0))
    assert bench.of(Filled) == [] if aside else [Filled(2)]
    bench.receive(Transferred(9, 2, "no memory"))
    assert bench.of(Filled) == [Filled(2)] and bench.of(Copied) == [Copied(2)]
    bench.step(1, Chunk(1, 4), Chunk(2, 4))
    bench.ran(1, 7, 8)
    [stepped] = bench.of(Stepped)
    assert (stepped.grants, stepped.failed, stepped.error) == ([1], [Failure(2, 4)], "no memory")
    bench.receive(Retire(2, "failed", 4))
    assert [retired.poisoned for retired in bench.of(Retired)] == [True]


def drafted(bench: Bench, *drafts: int, drawn: tuple[int, ...], **more: Any) -> Work:
    """Run a prompt of four tokens, and a step that feeds the drafts and draws these tokens."""
    bench.admit(1)
    bench.step(1, Chunk(1, 4))
    bench.ran(1, 50)
    work = bench.step(2, drafts=[RowDrafts(1, pack(drafts))])
    bench.ran(2, *drawn, **more)
    return work


def test_draws_count_up_to_the_one_after_the_first_wrong_draft(bench: Bench) -> None:
    assert drafted(bench, 7, 8, 9, drawn=(7, 8, 3, 4)).drafts == [WorkDraft(0, 0, (7, 8, 9))]
    stepped = bench.of(Stepped)[-1]
    assert (stepped.grants, unpack(stepped.tokens)) == ([1, 1, 1], [7, 8, 3]) and stepped.drafted == [Chunk(1, 3)]
    work = bench.step(3)
    assert (work.positions, work.drafts) == ([7], [WorkDraft(0, 2, ())]), "the state consumes the two that were right"
    bench.ran(3, 6)
    work = bench.step(4)
    assert (work.positions, work.drafts) == ([8], [])


def test_accepted_drafts_are_put_into_the_state_before_it_leaves(bench: Bench) -> None:
    drafted(bench, 7, 8, 9, drawn=(7, 8, 9, 3))
    bench.receive(Retire(1, "finished", 7))
    assert bench.device.calls[-1][1].commits == [WorkCommit(0, 2, 7)], "the third came after the stop"
    assert not bench.of(Retired)
    bench.ran(0)
    assert bench.of(Retired)[-1].position == 7 and not bench.of(Retired)[-1].poisoned


def test_a_state_whose_drafts_could_not_be_put_into_it_is_unusable(bench: Bench) -> None:
    drafted(bench, 7, drawn=(7, 8))
    bench.receive(Retire(1, "retracted", 6))
    bench.ran(0, error="broken")
    assert bench.of(Retired)[-1].poisoned


def test_a_row_retired_before_its_draws_are_known_keeps_the_state_before_its_drafts(bench: Bench) -> None:
    bench.admit(1)
    bench.step(1, Chunk(1, 4))
    bench.ran(1, 50)
    bench.step(2, drafts=[RowDrafts(1, pack([7]))])
    bench.receive(Retire(1, "aborted", 5))
    bench.ran(2, 7, 8)
    assert bench.of(Retired)[-1].position == 5 and bench.names[-1] == "run" and not bench.device.calls[-1][1].commits


def test_only_valid_draws_must_be_finite(bench: Bench) -> None:
    drafted(bench, 7, 8, drawn=(3, 0, 0), not_finite=[1, 2])
    assert unpack(bench.of(Stepped)[-1].tokens) == [3] and not bench.of(Stepped)[-1].failed
    bench.step(3, drafts=[RowDrafts(1, pack([5, 6]))])
    bench.ran(3, 5, 0, 0, not_finite=[1])
    assert bench.of(Stepped)[-1].failed == [Failure(1, 8)] and not bench.of(Stepped)[-1].grants


def test_a_row_that_was_left_out_of_a_step_fails_and_the_others_get_their_tokens(bench: Bench) -> None:
    for grant in (1, 2):
        bench.admit(grant)
    bench.step(1, Chunk(1, 4), Chunk(2, 4))
    bench.ran(1, 50, 60)
    bench.step(2, drafts=[RowDrafts(1, pack([7])), RowDrafts(2, pack([8, 9]))])
    bench.ran(2, 8, 9, 61, broken={1: "out of memory"})
    stepped = bench.of(Stepped)[-1]
    assert (stepped.grants, unpack(stepped.tokens)) == ([2, 2, 2], [8, 9, 61])
    assert stepped.failed == [Failure(1, 6)] and stepped.error == "out of memory"


def test_what_is_unsound_in_a_step_is_counted_without_the_rows_that_were_left_out(bench: Bench) -> None:
    for grant in (1, 2):
        bench.admit(grant)
    bench.step(1, Chunk(1, 2), Chunk(2, 3))
    bench.ran(1, unsound=[0], broken={1: "out of memory"})
    assert bench.of(Stepped)[-1].failed == [Failure(1, 2), Failure(2, 3)]


def test_predictions_are_passed_on_for_rows_that_have_drawn(bench: Bench) -> None:
    for grant in (1, 2):
        bench.admit(grant)
    work = bench.step(1, Chunk(1, 4), Chunk(2, 4), predict=[Chunk(2, 3), Chunk(1, 2)])
    first, second = (bench.forward.rows[grant].index for grant in (1, 2))
    assert work.predictions == [WorkPrediction(second, 3), WorkPrediction(first, 2)]
    bench.ran(1, 50, 60, not_finite=[0], predicted={second: [7, 8], first: [9]})
    assert bench.of(Stepped)[-1].predicted == [RowDrafts(2, pack([7, 8]))], "row 1 has failed"


def test_late_masks_reach_their_step_even_if_a_row_has_retired_and_is_used_again(bench: Bench) -> None:
    bench.admit(1)
    bench.admit(2)
    bench.step(1, Chunk(1, 4), Chunk(2, 4))
    work = bench.step(2, masks=[RowMask(2, 5, b"known")], late=[1])
    bench.receive(Retire(1, "limit", 5))
    bench.admit(3)
    assert work.late is not None and work.masks == [WorkMask(1, b"known")] and not work.late.done()
    bench.receive(StepMasks(2, [RowMask(1, 5, b"late")]))
    assert work.late.result() == [WorkMask(0, b"late")]
    bench.ran(1, 7, 7)
    bench.ran(2, 8, 8)
