"""The peers of an engine: the choice of a peer to ask for a state, and the states that peers have asked for."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count as numbers
from typing import Protocol, TypeAlias

from baton.actors.messages import Lend, Loaded, Offered, PeerReport, Unlend, Unoffered
from baton.actors.peers.frames import Beat, Compute, Give, Hand, Hello
from baton.actors.peers.link import Link
from baton.actors.peers.mover import Landing
from baton.actors.storage.peers import StateQuery
from baton.actors.tokens import Tokens, count

# An engine with the role "decode" multiplies its own time to compute a prompt by this, because its streams would wait.
DECODE_RELUCTANCE = 4.0
# Seconds to read one byte from a peer, assumed until the first copy has been read.
BYTE_AT_FIRST = 1e-9
NEWEST = 0.2  # weight of the newest measurement in the average of a link's speed
Deliver: TypeAlias = Callable[[PeerReport], None]
Done: TypeAlias = Callable[[str], None]
"""Called once at the end of an operation, with the reason why it failed, or with "" if it succeeded."""


class Computing(Protocol):
    """The computation of states for peers, as requests that are submitted to the ring like any client's."""

    def begin(self, loan: int, frame: Compute, link: str) -> str:
        """Submit a request of the session `session_of(loan)` that ends at the state; return "", or why not.

        `PeerEngines.computed` is called once.
        """
        ...

    def stop(self, loan: int) -> None:
        """Abort a request that was begun. `PeerEngines.computed` may still be called."""


class Heir(Protocol):
    """The part of this engine that takes over sessions of peers."""

    def take_over(self, frame: Hand, link: str, done: Done) -> None:
        """Take over a session and fetch its state from the link's peer, then call `done`."""


class HostMemory(Protocol):
    """Host memory, in which the cache and the device find copies by key."""

    def put(self, key: int, state: Landing) -> None: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a state and of its KV."""

    page_size: int  # tokens of a page; 0 without attention
    state_bytes: int
    page_bytes: int

    def bytes(self, position: int, first_page: int) -> int:
        """Return the bytes of a state at `position` and of its KV from `first_page` on."""
        pages = -(-position // self.page_size) - first_page if self.page_size else 0
        return self.state_bytes + self.page_bytes * max(pages, 0)


def session_of(loan: int) -> str:
    """Return the session of the request that computes a state for a peer. No client's session has such a name.

    With it the cache knows when the request's grant is closed: until then its last state is not in the tree.
    """
    return f"peer/{loan}"


class PeerEngines:
    """The Peers of a server: a Link for each connection.

    Outlives the four actors. Between `close` and `start` there is no cache: what it asked for or lent is forgotten.
    """

    def __init__(
        self,
        hello: Hello,
        host: HostMemory,
        computing: Computing,
        load: Callable[[], Beat],
        trace_of: Callable[[int], str] = lambda grant: "",
    ) -> None:
        """hello: the description of this engine. load: returns its load. trace_of: returns the trace id of a grant."""
        self.hello, self.load = hello, load
        self.layout = Layout(hello.page_size, hello.state_bytes, hello.page_bytes)
        self.links: dict[str, Link] = {}  # by name
        self._ended: list[Link] = []  # ended links whose mover may still write: their imports are not failed yet
        self.outcomes: Counter[tuple[str, str]] = Counter()  # states by (engine, outcome)
        self.read_bytes: Counter[str] = Counter()  # by engine
        self.read_seconds: dict[str, float] = {}  # by engine
        self._host, self._computing, self._trace_of = host, computing, trace_of
        self._deliver: Deliver | None = None
        self._numbers = numbers(1)
        self._asked: dict[int, Link] = {}  # the link of each ticket of an import
        self._gifts: dict[int, Done] = {}  # by ticket: states that `fetch` brings, without an Acquire
        self._handing: dict[int, Done] = {}  # by ticket: sessions and states that a peer is to take over
        self._landing_gifts: dict[int, Done] = {}  # by the cache's key: states of `_gifts` that are being read
        self.heir: Heir | None = None  # None: this engine takes over no sessions
        self._loans: dict[int, tuple[Link, int]] = {}  # by number of the loan: link, and the peer's ticket

    # A unit of actors

    def start(self, deliver: Deliver) -> None:
        """Connect a new cache. deliver: receives the answers, on the event loop."""
        self._deliver = deliver

    def close(self) -> None:
        """Disconnect the cache, which is about to be replaced or has ended."""
        self._deliver = None
        for link in (*self.links.values(), *self._ended):
            link.forget_imports()
            link.void_loans("the engine was restarted")
        self._asked.clear()
        gifts = [*self._gifts.values(), *self._landing_gifts.values()]
        self._gifts.clear()
        self._landing_gifts.clear()
        for done in gifts:
            done("the engine was restarted")
        self._loans = {number: (link, ticket) for number, (link, ticket) in self._loans.items() if ticket in link.loans}

    # Links

    def add(self, link: Link) -> None:
        self.links[link.name] = link

    def remove(self, link: Link, why: str) -> None:
        """End a link whose connection has ended."""
        self.links.pop(link.name, None)
        link.end(why)
        self._ended = [ended for ended in (*self._ended, link) if ended.imports]

    # The sink: Peers

    def ask(self, query: StateQuery) -> int | None:
        link = self._link_of_hint(query) if query.hint is not None else self._soonest(query)
        if link is None or self._deliver is None:
            return None
        ticket = next(self._numbers)
        self._asked[ticket] = link
        self._count(link, "asked")
        link.ask(ticket, query, self._trace_of(query.grant))
        return ticket

    def cancel(self, ticket: int) -> None:
        link = self._asked.pop(ticket, None)
        if link is not None:
            link.cancel(ticket)
            self._count(link, "cancelled")
        self._end_gift(ticket, "there is no room for the state, or it is here already")

    def pull(self, ticket: int, key: int) -> None:
        link = self._asked.pop(ticket, None)
        if (done := self._gifts.pop(ticket, None)) is not None:
            self._landing_gifts[key] = done
        if link is None:
            self._loaded(key, "the link has ended")
        else:
            link.pull(ticket, key)

    def fetch(self, name: str, salt: str, tokens: Tokens, done: Done) -> None:
        """Bring the state at the end of these tokens from a peer to host memory, ahead of its use.

        name: names the link. The whole KV comes too: what is in the pool may be evicted before the state is used.
        """
        link = self.links.get(name)
        if link is None or self._deliver is None:
            done("there is no link to the peer")
            return
        ticket = next(self._numbers)
        self._asked[ticket], self._gifts[ticket] = link, done
        link.fetch(ticket, salt, tokens, count(tokens))

    def _link_of_hint(self, query: StateQuery) -> Link | None:
        """Return the link to the peer that has the state, if moving the state is quicker than computing it here."""
        assert query.hint is not None
        link = self.links.get(query.hint.peer)
        moving = self._moving(link, query) if link is not None else 0.0
        return link if not query.seconds or moving < query.seconds else None

    def _soonest(self, query: StateQuery) -> Link | None:
        """Return the link to the peer from which a computed state would arrive first, if that is sooner than here."""
        if self.hello.role == "prefill":
            return None
        candidates = [link for link in self.links.values() if link.peer.role != "decode" and not link.beat.draining]
        best = min(candidates, key=lambda link: self._there(link, query), default=None)
        if best is None:
            return None
        is_decode = self.hello.role == "decode"
        here = (self.load().queue_seconds + query.seconds) * (DECODE_RELUCTANCE if is_decode else 1.0)
        if not query.seconds or not best.beat.token_seconds:
            return best if is_decode else None
        return best if self._there(best, query) < here else None

    def _there(self, link: Link, query: StateQuery) -> float:
        """Return the seconds until a state that a peer computes would be here."""
        tokens = count(query.tokens) - query.have
        return link.beat.queue_seconds + tokens * link.beat.token_seconds + self._moving(link, query)

    def _moving(self, link: Link, query: StateQuery) -> float:
        size = self.layout.bytes(count(query.tokens), query.first_page)
        return size * (link.byte_seconds or BYTE_AT_FIRST)

    # Sessions

    def hand(self, engine: str, log: bytes, position: int, done: Done) -> None:
        """Hand a session over to the peer engine of this name. position: as in Hand."""
        if (link := self._heir_link(engine, done)) is not None:
            link.hand(self._new_handing(done), log, position)

    def give(self, engine: str, salt: str, tokens: Tokens, done: Done) -> None:
        """Let the peer engine of this name fetch a state that is here."""
        if (link := self._heir_link(engine, done)) is not None:
            link.give(self._new_handing(done), salt, tokens)

    def is_linked(self, engine: str) -> bool:
        """Return whether there is a link to the peer engine of this name."""
        return any(link.peer.engine == engine for link in self.links.values())

    def _heir_link(self, engine: str, done: Done) -> Link | None:
        """Return the link to the engine of this name; if it can take nothing over, call `done` and return None."""
        link = next((link for link in self.links.values() if link.peer.engine == engine), None)
        if link is None or link.beat.draining:
            done(f"there is no link to an engine {engine!r}" if link is None else f"engine {engine!r} accepts nothing")
            return None
        return link

    def _new_handing(self, done: Done) -> int:
        ticket = next(self._numbers)
        self._handing[ticket] = done
        return ticket

    def take_over(self, link: Link, frame: Hand) -> None:
        if self.heir is None:
            link.taken_over(frame.ticket, "the engine is not ready")
        else:
            self.heir.take_over(frame, link.name, partial(link.taken_over, frame.ticket))

    def take_state(self, link: Link, frame: Give) -> None:
        self.fetch(link.name, frame.salt, frame.tokens, partial(link.taken_over, frame.ticket))

    def handed(self, ticket: int, error: str) -> None:
        self._handing.pop(ticket)(error)

    # The sink: Owner

    def offered(self, ticket: int, salt: str, tokens: Tokens, first_page: int) -> None:
        self._send(Offered(ticket, salt, tokens, first_page, ticket in self._gifts))

    def declined(self, link: Link, ticket: int, why: str) -> None:
        if self._asked.pop(ticket, None) is not None:
            self._count(link, "declined")
            if ticket in self._gifts:
                self._end_gift(ticket, why)
            else:
                self._send(Unoffered(ticket, why))

    def _end_gift(self, ticket: int, error: str) -> None:
        if (done := self._gifts.pop(ticket, None)) is not None:
            done(error)

    def _loaded(self, key: int, error: str) -> None:
        self._send(Loaded(key, error))
        if (done := self._landing_gifts.pop(key, None)) is not None:
            done(error)

    def landed(
        self, link: Link, key: int, landing: Landing | None, error: str, seconds: float, first_page: int
    ) -> None:
        if landing is not None:
            self._host.put(key, landing)
            self._measured(link, self.layout.bytes(landing.position, first_page), seconds)
        self._count(link, "failed" if error else "imported")
        self._loaded(key, error)

    def _measured(self, link: Link, size: int, seconds: float) -> None:
        engine = link.peer.engine
        self.read_bytes[engine] += size
        self.read_seconds[engine] = self.read_seconds.get(engine, 0.0) + seconds
        if seconds > 0:
            new = seconds / size
            link.byte_seconds = link.byte_seconds + NEWEST * (new - link.byte_seconds) if link.byte_seconds else new

    # The source: Peers and Owner

    def lent(self, ticket: int, key: int, position: int) -> None:
        if ticket not in self._loans:
            return  # The link has ended the loan already, and Unlend is on its way.
        link, peers_ticket = self._loans[ticket]
        self._count(link, "lent")
        link.lent(peers_ticket, key, position, self.layout.page_size)

    def not_lent(self, ticket: int, why: str) -> None:
        if ticket not in self._loans:
            return
        link, peers_ticket = self._loans.pop(ticket)
        self._count(link, "refused")
        link.not_lent(peers_ticket, why)

    def new_loan(self, link: Link, ticket: int) -> int:
        number = next(self._numbers)
        self._loans[number] = link, ticket
        return number

    def compute(self, loan: int, frame: Compute) -> str:
        link, _ = self._loans[loan]
        why = self._why_not() or self._computing.begin(loan, frame, link.name)
        if why:
            del self._loans[loan]
        return why

    def _why_not(self) -> str:
        """Return why this engine computes nothing for peers now, or "" if it does.

        An engine that waits for a peer's computation accepts none itself. Otherwise engines could deadlock: each waits
        for the next one in a circle, and requests that wait take all its rows.
        """
        if self._deliver is None:
            return "the engine is restarting"
        return "it waits for a peer itself" if any(link.waits_for_computing for link in self.links.values()) else ""

    def computed(self, loan: int, error: str) -> None:
        """Note that the request of `Computing.begin` has ended. error: why there is no state; "" if there is one."""
        entry = self._loans.get(loan)
        if entry is None:
            return
        link, ticket = entry
        if error or self._deliver is None:
            del self._loans[loan]
        link.computed(ticket, error or ("" if self._deliver is not None else "the engine is restarting"))

    def stop_computing(self, loan: int) -> None:
        del self._loans[loan]
        self._computing.stop(loan)

    def lend(self, loan: int, salt: str, tokens: Tokens, least: int, computed: bool) -> None:
        if self._deliver is None:
            self.not_lent(loan, "the engine is restarting")
        else:
            self._send(Lend(loan, salt, tokens, least, session_of(loan) if computed else ""))

    def unlend(self, loan: int) -> None:
        del self._loans[loan]
        self._send(Unlend(loan))

    def _send(self, report: PeerReport) -> None:
        if self._deliver is not None:
            self._deliver(report)

    def _count(self, link: Link, outcome: str) -> None:
        self.outcomes[link.peer.engine, outcome] += 1

    def figures(self) -> Iterable[dict[str, object]]:
        """Yield the state of each link, for /debug/peers."""
        for link in self.links.values():
            yield {
                "link": link.name,
                "engine": link.peer.engine,
                "boot": link.peer.boot,
                "role": link.peer.role,
                "queue_seconds": link.beat.queue_seconds,
                "token_seconds": link.beat.token_seconds,
                "rows": link.beat.rows,
                "draining": link.beat.draining,
                "bytes_per_second": 1 / link.byte_seconds if link.byte_seconds else None,
                "imports": [found.stage.name.lower() for found in link.imports.values()],
                "loans": [loan.stage.name.lower() for loan in link.loans.values()],
            }
