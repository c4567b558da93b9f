"""The hints of clients: positions at which a client wants a state, and whether it will resume from the end soon."""

from baton.actors.cache.account import Account
from baton.actors.cache.eviction import EvictionPolicy
from baton.actors.cache.radix import path_to_root
from baton.actors.kinds import Kind


def claim_hinted(account: Account, eviction: EvictionPolicy) -> None:
    """Report to the eviction policy each state on the grant's path at a position that the client has requested."""
    positions = account.acquire.checkpoints
    for step in path_to_root(account.node) if positions else ():
        if step.state is not None and step.end in positions:
            eviction.requested(step)


def denied_positions(account: Account) -> list[int]:
    """Return the positions on the grant's path that the client has requested, and at which there is no state."""
    positions = account.acquire.checkpoints
    if not positions:
        return []
    cached = {step.end for step in path_to_root(account.node) if step.state is not None}
    return [position for position in positions if position <= account.node.end and position not in cached]


def end_kind(account: Account, kind: Kind) -> Kind:
    """Return the kind of a request's end state: SOON if the client has said that it will resume soon, else `kind`."""
    return Kind.SOON if account.acquire.keep == "soon" else kind
