"""The ring's current contents as plain values, for /debug."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.actors.cache.radix import Node, RadixTree, path_to_root
from baton.actors.forward.actor import Forward
from baton.actors.lease import Lease, Ledger
from baton.actors.scheduler.actor import Scheduler


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a slot."""

    position: int | None  # tokens that the state in the slot has consumed; None if there is no state
    request: str | None  # the id of the running request that holds the slot


def explain_slots(
    ledger: Ledger, scheduler: Scheduler, forward: Forward, tree: RadixTree[Lease], now: float
) -> list[dict[str, object]]:
    """Return the ledger's record of each slot, with its use."""
    uses = dict(_uses(scheduler, forward, tree))
    unknown = Use(None, None)
    return [
        {
            "slot": slot,
            "place": str(entry.place),
            "holder": entry.holder,
            "generation": entry.generation,
            "loans": entry.loans,
            "seconds": round(now - entry.since, 3) if entry.generation else None,
            "position": uses.get(slot, unknown).position,
            "request": uses.get(slot, unknown).request,
        }
        for slot, entry in enumerate(ledger.entries)
    ]


def _uses(scheduler: Scheduler, forward: Forward, tree: RadixTree[Lease]) -> Iterator[tuple[int, Use]]:
    """Yield slots with their use: cached states, states of running rows, and rows' spare checkpoint slots."""
    for node in tree.states:
        if node.state is not None:
            yield node.state.slot, Use(node.end, None)
    names = {grant: row.record.request.id for grant, row in scheduler.state.rows.items()}
    names |= {grant: record.request.id for grant, record in scheduler.state.closing.items()}
    for running in forward.rows.values():
        yield running.state.slot, Use(running.position, names.get(running.grant))
    for row in scheduler.state.rows.values():
        for spare in row.spares:
            yield spare.slot, Use(None, row.record.request.id)


def explain_tree(tree: RadixTree[Lease], worth: Callable[[Node[Lease]], float]) -> list[dict[str, object]]:
    """Return the nodes of the tree, roots first. `slot`, `kind` and `worth` are None if the node has no state."""
    return [_explain_node(node, worth) for node in (*tree.roots.values(), *tree.nodes)]


def _explain_node(node: Node[Lease], worth: Callable[[Node[Lease]], float]) -> dict[str, object]:
    *_, root = path_to_root(node)
    return {
        "id": node.id,
        "parent": node.parent.id if node.parent is not None else None,
        "start": node.start,
        "end": node.end,
        "pages": list(node.pages),
        "slot": node.state.slot if node.state is not None else None,
        "kind": node.kind.label if node.state is not None else None,
        "worth": worth(node) if node.state is not None else None,
        "evicted": node.evicted,
        "sessions": sorted(node.sessions),
        "pins": node.pins,
        "salt": _digest(root.salt),
    }


def _digest(salt: str | None) -> str:
    """Return a digest that distinguishes salts without showing them; "" for no salt."""
    return hashlib.sha256(salt.encode()).hexdigest()[:16] if salt else ""
