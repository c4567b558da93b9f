"""The slots and the tree as plain values, as /debug shows them."""

from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.forward.actor import Forward, RunningRow
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.runtime.explain import explain_slots, explain_tree
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import Limits, OpenRequest, ScheduledRow
from baton.actors.tokens import pack


def scheduled(name: str, grant: int, spares: list[Lease]) -> ScheduledRow:
    record = OpenRequest(Request(name, pack([1, 2]), 2, Sampling(), Stops(1)), grant)
    return ScheduledRow(record, grant, 0, 2, 1, None, {}, spares=spares)


def test_each_slot_is_shown_with_its_use() -> None:
    now = 10.0
    ledger = Ledger(6, clock=lambda: now)
    cached, running, closing, spare, astray = (ledger.take(who) for who in ("cache", "forward", "forward", "a", "b"))
    assert cached and running and closing and spare and astray
    tree: RadixTree[Lease] = RadixTree(PagePool(0, 1))
    node = tree.insert(tree.match("", b"", 0).node, pack([1, 2, 3]), [])
    now = 11.5
    ledger.cache(cached, node.id)
    tree.set_state(node, cached)
    ledger.lend(cached)
    scheduler = Scheduler(lambda to, message: None, Limits())
    scheduler.state.rows[1] = scheduled("runs", 1, [spare])
    scheduler.state.closing[2] = scheduled("closes", 2, []).record
    rows = {1: RunningRow(0, 1, running, 7, 2), 2: RunningRow(1, 2, closing, 9, 2)}
    forward = Forward(lambda to, message: None, None, 2, rows)  # type: ignore[arg-type]
    shown = explain_slots(ledger, scheduler, forward, tree, 14.0004)
    figures = [
        tuple(line[name] for name in ("slot", "place", "loans", "seconds", "position", "request")) for line in shown
    ]
    assert figures == [
        (0, "cached", 1, 2.5, 3, None),
        (1, "owned", 0, 4.0, 7, "runs"),
        (2, "owned", 0, 4.0, 9, "closes"),
        (3, "owned", 0, 4.0, None, "runs"),
        (4, "owned", 0, 4.0, None, None),
        (5, "free", 0, None, None, None),
    ]
    assert (shown[0]["holder"], shown[1]["holder"], shown[0]["generation"]) == (f"node {node.id}", "forward", 1)
    ledger.close()


def test_the_tree_is_shown_from_its_roots_down() -> None:
    ledger, pages = Ledger(1), PagePool(4, 2)
    tree: RadixTree[Lease] = RadixTree(pages)
    table = pages.take(2)
    node = tree.insert(tree.match("", b"", 0).node, pack([1, 2, 3]), table)
    lease = ledger.take("cache")
    assert lease is not None
    tree.set_state(node, lease)
    node.sessions, node.pins, node.evicted = {"b", "a"}, 2, True
    node.kind = Kind.FRONTIER
    root, shown = explain_tree(tree, ByAge().worth)
    assert (root["parent"], root["slot"], root["start"], root["end"]) == (None, None, 0, 0)
    assert shown == {
        "id": node.id,
        "parent": root["id"],
        "start": 0,
        "end": 3,
        "pages": table,
        "slot": 0,
        "kind": "frontier",
        "worth": 1.0,
        "evicted": True,
        "sessions": ["a", "b"],
        "pins": 2,
        "salt": "",
    }
    ledger.close()
