"""The ring's current contents as plain values, for /debug."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.actors.cache.actor import Cache
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.cache.below.state_copy import copy_of
from baton.actors.cache.radix import Node, RadixTree, path_to_root, root_of, tokens_to
from baton.actors.forward.actor import Forward
from baton.actors.lease import Lease, Ledger
from baton.actors.scheduler.actor import Scheduler
from baton.actors.tokens import Tokens


@dataclass(frozen=True, slots=True)
class CachedState:
    """A state that is in the pool or in host memory."""

    salt: str
    tokens: Tokens  # the state is at their end
    worth: float  # states are compared by this number; see `Order.worth`


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


def states_without_session(cache: Cache, tiers: HostAndDisk) -> list[CachedState]:
    """Return the states in the pool and in host memory that no session's name is on, those of most worth first."""
    copies = tiers.ranking.of_copies(tiers.store.tree)
    found: dict[tuple[str, Tokens], float] = {}
    for copy in tiers.store.tree.states:
        if copy_of(copy).in_host and not copy.sessions:
            found[root_of(copy).salt, tokens_to(copy)] = copies.worth(copy)
    for node in cache.tree.states:
        if not node.sessions:
            found[root_of(node).salt, tokens_to(node)] = cache.eviction.worth(node)
    states = [CachedState(salt, tokens, worth) for (salt, tokens), worth in found.items()]
    return sorted(states, key=lambda state: -state.worth)


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
