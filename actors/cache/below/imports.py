"""States that peers are asked for, and copies of such states in transit to host memory."""

from collections import Counter
from dataclasses import dataclass, field

from baton.actors.cache.below.arrivals import Arrivals
from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.ranking import Ranking
from baton.actors.cache.below.state_copy import StateCopy
from baton.actors.cache.radix import Node
from baton.actors.cache.waiting import Parked
from baton.actors.messages import Loaded, Offered, Unoffered
from baton.actors.storage.peers import Peers, StateQuery
from baton.actors.tokens import Tokens, cut

# A peer is asked only if its state would save more tokens than this.
WORTH_ASKING = 64


@dataclass(eq=False, slots=True)
class Inquiry:
    """A state that a peer was asked for, and the Acquires that wait for the peer's answer."""

    ticket: int
    salt: str
    tokens: Tokens
    waiting: list[Parked] = field(default_factory=list)


class Imports:
    """The states that come from peers.

    The way of a state from a peer to a slot here::

        cache ── ask ──▶ peers        the Acquire waits
        cache ◀── Offered ── peers    a peer lends a copy; host memory for it is reserved and lent to the Acquire
        cache ── pull ──▶ peers       the bytes are read
        cache ◀── Loaded ─── peers    the loan held until the last byte was read: a slot is filled from the copy

    If the state does not come, the Acquire computes its tokens and reports "peer". An Acquire asks at most once.
    """

    def __init__(
        self, peers: Peers, store: CopyStore, ranking: Ranking, arrivals: Arrivals, least: int = WORTH_ASKING
    ) -> None:
        """least: a peer is asked only if its state would save more tokens than this."""
        self.counters: Counter[str] = Counter()
        self._peers, self._store, self._ranking, self._arrivals, self._least = peers, store, ranking, arrivals, least
        self._inquiries: dict[int, Inquiry] = {}  # by ticket
        self._asking: dict[int, Inquiry] = {}  # the inquiry that each Acquire waits for, by grant
        self._answered: set[int] = set()  # grants of parked Acquires that have had an answer
        self._landing: set[int] = set()  # keys of the copies that are being read

    def waits(self, parked: Parked, position: int, pages: int) -> bool:
        """Return whether this Acquire waits for a peer's answer; ask a peer if that saves time.

        position, pages: what the Acquire could resume from now: a state, and whole pages of KV
        """
        acquire = parked.acquire
        if acquire.grant in self._asking:
            return True
        end = min(acquire.limit, acquire.hint.position) if acquire.hint is not None else acquire.limit
        if acquire.grant in self._answered or end - position <= self._least:
            return False
        tokens = cut(acquire.tokens, 0, end)
        inquiry = self._same(acquire.salt, tokens)
        if inquiry is None:
            seconds = self._ranking.seconds_to_compute(position, end)
            query = StateQuery(
                acquire.salt, tokens, position, pages, seconds, acquire.priority, acquire.grant, acquire.hint
            )
            ticket = self._peers.ask(query)
            if ticket is None:
                return False
            self.counters["peer_asked"] += 1
            inquiry = self._inquiries[ticket] = Inquiry(ticket, acquire.salt, tokens)
        inquiry.waiting.append(parked)
        self._asking[acquire.grant] = inquiry
        return True

    def is_asking(self, parked: Parked) -> bool:
        """Return whether this Acquire waits for a peer's answer."""
        return parked.acquire.grant in self._asking

    def _same(self, salt: str, tokens: Tokens) -> Inquiry | None:
        return next((i for i in self._inquiries.values() if i.salt == salt and i.tokens == tokens), None)

    def release(self, parked: Parked) -> None:
        """Note that this Acquire was answered or cancelled. If no other waits for the peer's state, give that up."""
        grant = parked.acquire.grant
        self._answered.discard(grant)
        inquiry = self._asking.pop(grant, None)
        if inquiry is not None:
            inquiry.waiting.remove(parked)
            if not inquiry.waiting:
                del self._inquiries[inquiry.ticket]
                self._peers.cancel(inquiry.ticket)

    def offered(self, offered: Offered, is_wanted: bool) -> None:
        """Read an offered copy into host memory if there is room and nothing like it; otherwise give it up.

        is_wanted: whether a state for which no Acquire waits is of use
        """
        waiting = self._end(offered.ticket)
        if not waiting and not offered.is_gift:
            return  # It was cancelled while the offer was on its way.
        place = None
        if waiting or is_wanted:
            place = self._store.reserve_import(offered.salt, offered.tokens, offered.first_page)
        if place is None:
            self._peers.cancel(offered.ticket)
            self._fail(waiting)
            return
        node, key = place
        for parked in waiting:
            self._arrivals.wait_for(node, parked)
            parked.origin = "peer"
        self._landing.add(key)
        self._peers.pull(offered.ticket, key)

    def unoffered(self, unoffered: Unoffered) -> None:
        self._fail(self._end(unoffered.ticket))

    def loaded(self, loaded: Loaded, node: Node[StateCopy]) -> bool:
        """Note that a copy was read or could not be read; return False if it is not from a peer.

        node: the node of the copy
        """
        if loaded.key not in self._landing:
            return False
        self._landing.discard(loaded.key)
        self._arrivals.loaded(node, loaded.error, "peer")
        self.counters["peer_failed" if loaded.error else "peer_imports"] += 1
        return True

    def _end(self, ticket: int) -> list[Parked]:
        """End an inquiry, and return the Acquires that waited for it."""
        inquiry = self._inquiries.pop(ticket, None)
        for parked in inquiry.waiting if inquiry is not None else ():
            del self._asking[parked.acquire.grant]
            self._answered.add(parked.acquire.grant)
        return inquiry.waiting if inquiry is not None else []

    def _fail(self, waiting: list[Parked]) -> None:
        for parked in waiting:
            parked.miss_reason = "peer"
            self.counters["peer_failed"] += 1
