"""A test bench for the cache without the other actors: tests send messages to the cache and read what it sends."""

from collections.abc import Callable
from typing import Any

from baton.actors.cache.actor import Cache
from baton.actors.cache.below.assembly import make_cache
from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.pages import PagePool
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger
from baton.actors.messages import (
    Acquire,
    Copied,
    Donate,
    Export,
    Exported,
    Granted,
    Message,
    Name,
    SaveFromReq,
    Spare,
    Want,
)
from baton.actors.tokens import pack

PAGE = 4
HOST = TierLimits(1000, 0, 100)


class Bench:
    """A cache without the other actors, and a list of the messages that it has sent."""

    def __init__(self, slots: int = 8, pages: int = 0, make: Callable[..., Cache] = make_cache, **options: Any) -> None:
        """Make a cache. make: builds the cache from its Send, its ledger, its page pool, and `options`."""
        self.sent: list[tuple[str, Message]] = []
        self.ledger = Ledger(slots)
        pool = PagePool(pages, PAGE)
        self.cache = make(lambda to, m: self.sent.append((to, m)), self.ledger, pool, **options)
        self._grants = 0

    def receive(self, message: Message) -> None:
        self.cache.receive(message)
        self.cache.act()

    def ask(self, tokens: list[int], limit: int | None = None, **more: Any) -> int:
        self._grants += 1
        fields = {"salt": "", "predecessor": None} | more
        at_most = len(tokens) - 1 if limit is None else limit
        self.receive(Acquire(self._grants, pack(tokens), at_most, **fields))
        return self._grants

    def spares(self, grant: int, *positions: int, kind: Kind = Kind.BRANCH) -> list[Lease]:
        """Ask the cache for checkpoint slots at these positions; return the slots that it grants."""
        self.cache.receive(Want(grant, [(position, kind) for position in positions]))
        spare = self.of(Spare)[-1]
        assert spare.grant == grant and len(spare.leases) + len(spare.denied) == len(positions)
        self.cache.act()
        return spare.leases

    def granted(self, grant: int) -> Granted:
        [granted] = [m for m in self.of(Granted) if m.grant == grant]
        return granted

    def run(self, tokens: list[int], session: str = "", **more: Any) -> Granted:
        """Run a request whose sequence ends after these tokens, and donate its state at that end."""
        grant = self.ask(tokens, session=session, **more)
        granted = self.granted(grant)
        self.receive(Copied(grant))
        rest = pack(tokens[granted.hit.cached_tokens :])
        if session:
            self.receive(SaveFromReq(grant, session, granted.state, len(tokens), rest))
        else:
            self.receive(Donate(grant, granted.state, len(tokens), rest, closes=True))
        return granted

    def open(self, session: str) -> None:
        self.receive(Name(session, "", b""))

    def of(self, kind: type) -> list:
        return [message for _, message in self.sent if isinstance(message, kind)]

    @property
    def counted(self) -> dict[str, int]:
        return +(self.cache.counters + self.cache.tiers.counters)

    @property
    def states(self) -> list[int]:
        """Return the end position of each node that keeps a state, least recently used first."""
        return [node.end for node in self.cache.tree.states]


def exported(bench: Bench) -> list[Export]:
    """Complete every export that the cache has sent, as forward would, and return these exports."""
    found = bench.of(Export)
    bench.sent[:] = [(to, m) for to, m in bench.sent if not isinstance(m, Export)]
    for export in found:
        bench.receive(Exported(export.key, export.state))
    return found


def take(bench: Bench) -> Lease:
    lease = bench.ledger.take("cache")
    assert lease is not None
    return lease
