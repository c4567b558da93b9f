"""The order of the queue: flows take turns, whatever the order of arrival and the number of requests of each flow."""

import random
from collections import Counter

from baton.actors.requests import Request, Sampling, Stops
from baton.actors.scheduler.plan import Limits, ScheduledRow, SchedulerState, plan
from baton.actors.scheduler.queue import OpenRequest, Queue
from baton.actors.tokens import pack


def record(arrival: int, flow: str, priority: int = 0) -> OpenRequest:
    id = f"{flow}{arrival}"
    return OpenRequest(Request(id, pack([1]), 1, Sampling(), Stops(9), priority, flow=flow), arrival)


def row(record: OpenRequest, position: int = 1, length: int = 1) -> ScheduledRow:
    return ScheduledRow(record, record.arrival, position, length, 100, None, {})


def state(rows: list[ScheduledRow], waiting: list[OpenRequest], **limits: int) -> SchedulerState:
    current = SchedulerState(Limits(**limits))
    for running in rows:
        current.add(running)
    for queued in waiting:
        current.queue.add(queued)
    return current


def test_the_first_request_of_a_flow_is_before_the_second_of_another() -> None:
    queue = Queue()
    for arrival in range(6):
        queue.add(record(arrival, "aaaabb"[arrival]))
    assert [each.request.id for each in queue] == ["a0", "b4", "a1", "b5", "a2", "a3"]
    queue.count_row("b", 1)
    assert [each.request.id for each in queue.first(3)] == ["a0", "a1", "b4"]


def test_priority_goes_before_turns() -> None:
    queue = Queue()
    for each in (record(0, "a"), record(1, "a", priority=-1), record(2, "b")):
        queue.add(each)
    assert [each.request.id for each in queue] == ["a1", "b2", "a0"]


def test_the_order_equals_that_of_counting_from_scratch() -> None:
    rng = random.Random(3)
    queue, waiting, rows = Queue(), list[OpenRequest](), Counter[str]()
    for arrival in range(2000):
        flow = rng.choice("abcdefgh")
        match rng.choice(["add", "add", "remove", "start", "end"]):
            case "add":
                waiting.append(record(arrival, flow, rng.choice([0, 0, 1])))
                queue.add(waiting[-1])
            case "remove" if waiting:
                queue.remove(waiting.pop(rng.randrange(len(waiting))))
            case "start":
                rows[flow] += 1
                queue.count_row(flow, 1)
            case "end" if rows[flow]:
                rows[flow] -= 1
                queue.count_row(flow, -1)
        before, keys = Counter(rows), {}
        for each in sorted(waiting, key=lambda each: each.order):
            keys[each.arrival] = each.request.priority, before[each.flow], each.arrival
            before[each.flow] += 1
        right = sorted(waiting, key=lambda each: keys[each.arrival])
        count = rng.randrange(12)
        assert queue.first(count) == right[:count] and len(queue) == len(waiting)
        assert queue.rows == +rows and len(queue.rows) == len(+rows), "a flow without rows is forgotten"


def test_a_flow_gives_way_to_one_that_has_two_rows_fewer() -> None:
    running = [row(record(arrival, "a")) for arrival in range(4)]
    current = state(running, [record(8, "b"), record(9, "b")], max_running=4)
    assert plan(current).retire == [(3, "retracted")]
    current.closing[3] = running[3].record
    assert plan(current).retire == [], "one that is on its way out makes room"
    current.closing.clear()
    current.remove(3)
    assert [each.request.id for each in plan(current).acquire] == ["b8"]
    assert plan(current).retire == [(2, "retracted")], "then there are two of each"
    current.remove(2)
    current.remove(1)
    current.queue.remove(next(iter(current.queue)))
    for arrival in (8, 10):
        current.add(row(record(arrival, "b")))
    current.add(row(record(1, "a")))
    assert plan(current).retire == [], "two of each, and it would only be the other way round"


def test_no_row_gives_way_to_a_less_urgent_request() -> None:
    running = [row(record(arrival, "a", priority=-1)) for arrival in range(4)]
    assert plan(state(running, [record(8, "b")], max_running=4)).retire == []


def test_rows_of_one_flow_keep_theirs() -> None:
    running = [row(record(arrival, "a")) for arrival in range(4)]
    assert plan(state(running, [record(8, "a", priority=-1)], max_running=4)).retire == []


def test_a_prompt_does_not_wait_for_all_prompts_of_another_flow() -> None:
    running = [row(record(arrival, "a"), 0, 8) for arrival in range(4)]
    step = plan(state([*running, row(record(9, "b"), 0, 8)], [], step_tokens=20)).step
    assert step is not None
    assert [(chunk.grant, chunk.tokens) for chunk in step.chunks] == [(0, 8), (9, 8), (1, 4)]


def test_a_long_prompt_leaves_a_quarter_to_those_of_other_flows() -> None:
    running = [row(record(0, "a"), 0, 1000), row(record(1, "b"), 0, 3), row(record(2, "c"), 0, 90)]
    step = plan(state(running, [], step_tokens=40)).step
    assert step is not None
    assert [(chunk.grant, chunk.tokens) for chunk in step.chunks] == [(0, 30), (1, 3), (2, 7)]


def test_urgent_prompts_come_first_in_the_quarter_too() -> None:
    running = [row(record(0, "a"), 0, 1000), row(record(1, "b"), 0, 200), row(record(2, "c", priority=9), 0, 90)]
    step = plan(state(running, [], step_tokens=40)).step
    assert step is not None
    assert [(chunk.grant, chunk.tokens) for chunk in step.chunks] == [(0, 30), (1, 10)]


def test_the_quarter_goes_to_few_prompts_at_a_time() -> None:
    running = [row(record(arrival, f"flow {arrival}"), 0, 128) for arrival in range(32)]
    step = plan(state(running, [], step_tokens=512, max_running=32)).step
    assert step is not None
    assert [(chunk.grant, chunk.tokens) for chunk in step.chunks] == [(grant, 128) for grant in range(4)]
    step = plan(state(running, [], step_tokens=120, max_running=32)).step
    assert step is not None
    assert [(chunk.grant, chunk.tokens) for chunk in step.chunks] == [(0, 90), (1, 30)]
