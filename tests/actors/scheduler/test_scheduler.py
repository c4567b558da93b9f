import pytest

import baton.actors.scheduler.plan
from baton.actors.lease import Ledger
from baton.actors.messages import (
    Abort,
    Acquire,
    Admit,
    Chunk,
    Closed,
    Extend,
    Extended,
    Fill,
    Filled,
    Granted,
    GrantPages,
    Message,
    Retire,
    Settled,
    Step,
    Submit,
)
from baton.actors.requests import Hit, Request, Sampling, Stops
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import Limits, OpenRequest, Plan, ScheduledRow
from baton.actors.tokens import pack


class Bench:
    """A scheduler without the other actors, and the messages that it has sent."""

    def __init__(self, **limits: int) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.ledger = Ledger(32)
        self.scheduler = Scheduler(lambda to, message: self.sent.append((to, message)), Limits(**limits))

    def submit(self, name: str, tokens: list[int], max_tokens: int = 10) -> None:
        self.receive(Submit(Request(name, pack(tokens), len(tokens), Sampling(), Stops(max_tokens))))

    def grant(self, grant: int, pages: int = 0) -> None:
        state = self.ledger.take("scheduler")
        assert state is not None
        self.receive(Granted(grant, state, Hit(), False, None, list(range(pages)), None, None))

    def receive(self, message: Message) -> None:
        self.scheduler.receive(message)
        self.scheduler.act()

    def of(self, kind: type) -> list[Message]:
        return [message for _, message in self.sent if isinstance(message, kind)]


@pytest.mark.parametrize(("depth", "steps"), [(1, 1), (2, 2)])
def test_overlap_keeps_two_steps_in_flight(depth: int, steps: int) -> None:
    bench = Bench(depth=depth)
    bench.submit("a", [1, 2, 3])
    bench.grant(1)
    assert len(bench.of(Admit)) == 1 and len(bench.of(Step)) == steps
    bench.receive(Settled(1, []))
    assert len(bench.of(Step)) == steps + 1
    bench.ledger.close()


def test_a_row_is_in_no_step_until_it_is_filled() -> None:
    bench = Bench(depth=2)
    bench.submit("a", [1, 2, 3])
    bench.submit("b", [1, 2, 3])
    state = bench.ledger.take("scheduler")
    assert state is not None
    bench.receive(Granted(1, state, Hit(2, 2, origin="host"), False, None, [], None, None, Fill(7, 0, 0)))
    assert len(bench.of(Admit)) == 1 and bench.of(Step) == []
    bench.grant(2)
    [chunks] = [step.chunks for step in bench.of(Step)[:1]]  # type: ignore[attr-defined]
    assert chunks == [Chunk(2, 3)]
    bench.receive(Filled(1))
    bench.receive(Settled(1, []))
    assert Chunk(1, 1) in bench.of(Step)[-1].chunks  # type: ignore[attr-defined]
    bench.receive(Filled(9))  # a grant without a row
    bench.ledger.close()


def test_one_retire_for_the_first_reason() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], max_tokens=2)
    bench.grant(1)
    assert bench.of(Retire) == [Retire(1, "limit", 4)]
    bench.receive(Settled(1, [1]))
    assert bench.of(Retire) == [Retire(1, "limit", 4)]
    bench.ledger.close()


def test_an_acquire_names_the_closing_grant_that_its_prompt_continues() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3])
    bench.grant(1)
    bench.receive(Settled(1, [1]))
    bench.submit("b", [1, 2, 3, 4])
    bench.submit("c", [1, 2, 4])
    assert [acquire.predecessor for acquire in bench.of(Acquire) if isinstance(acquire, Acquire)] == [None, 1, None]
    bench.receive(Closed(1))
    bench.submit("d", [1, 2, 3, 4])
    assert bench.of(Acquire)[-1].predecessor is None
    bench.ledger.close()


def test_a_plan_looks_only_at_rows_that_need_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 rows at different offsets in their pages of 16 tokens, about two rows need a page at each step."""
    looked_at: list[int] = []
    plan_row = baton.actors.scheduler.plan.plan_row

    def counted(limits: Limits, row: ScheduledRow, position: int, commands: Plan) -> None:
        looked_at.append(row.grant)
        plan_row(limits, row, position, commands)

    monkeypatch.setattr(baton.actors.scheduler.plan, "plan_row", counted)
    bench = Bench(max_running=32, page_size=16, min_saving=100)
    for index in range(32):
        bench.submit(f"{index}", [1] * (1 + index), max_tokens=1000)
    for grant in range(1, 33):
        bench.grant(grant, pages=3)
    decode(bench, 64)
    looked_at.clear()
    before = {grant: row.position for grant, row in bench.scheduler.state.rows.items()}
    decode(bench, 64)
    assert {row.position - before[grant] for grant, row in bench.scheduler.state.rows.items()} == {64}
    assert 128 <= len(looked_at) < 32 * 64 / 2
    bench.ledger.close()


def test_a_request_is_found_in_a_long_queue_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr(OpenRequest, "__eq__", lambda one, other: compared.append(other) or one is other)
    bench = Bench(max_running=1, max_queue=1000)
    for index in range(1000):
        bench.submit(f"{index}", [1])
    for index in range(999, 500, -1):
        bench.receive(Abort(f"{index}"))
    left = [record.request.id for record in bench.scheduler.state.queue]
    assert left == [f"{index}" for index in range(501)] and not compared
    bench.ledger.close()


def decode(bench: Bench, steps: int) -> None:
    """Settle this many steps, and grant at once each page that a row requests."""
    for _ in range(steps):
        [*_, step] = bench.of(Step)
        bench.sent.clear()
        assert isinstance(step, Step)
        bench.receive(Settled(step.step - 1, []))
        for extend in bench.of(Extend):
            assert isinstance(extend, Extend)
            bench.receive(Extended([GrantPages(grant, [0]) for grant in extend.grants], []))
