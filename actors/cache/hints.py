"""What a client says of the states of its request: where it wants one, and whether it will go on from the last."""

from baton.actors.cache.account import Account
from baton.actors.cache.radix import path_to_root
from baton.actors.cache.worth.lives import Lives
from baton.actors.kinds import Kind


def claim_asked(account: Account, lives: Lives) -> None:
    """Of the states on the grant's path those at positions that its client has named are what it asked for."""
    asked = account.acquire.checkpoints
    for step in path_to_root(account.node) if asked else ():
        if step.state is not None and step.end in asked:
            lives.asked(step)


def denied(account: Account) -> list[int]:
    """The positions on the grant's path that its client has named, and at which there is no state."""
    asked = account.acquire.checkpoints
    if not asked:
        return []
    kept = {step.end for step in path_to_root(account.node) if step.state is not None}
    return [position for position in asked if position <= account.node.end and position not in kept]


def end_kind(account: Account, kind: Kind) -> Kind:
    """What the state at a grant's end is, which is `kind` where its client says nothing of it."""
    return Kind.SOON if account.acquire.keep == "soon" else kind
