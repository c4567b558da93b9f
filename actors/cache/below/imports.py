"""States that peers are asked for, and copies of such states in transit to host memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.actors.cache.below.arrivals import Arrivals
from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.ranking import Ranking
from baton.actors.cache.below.state_copy import StateCopy
from baton.actors.cache.radix import Node
from baton.actors.cache.waiting import Parked
from baton.actors.messages import Loaded, Offered, Prefetch, Unoffered
from baton.actors.requests import PeerHint
from baton.actors.storage.peers import Peers, StateQuery
from baton.actors.tokens import Tokens, count, cut

# A peer is asked only if its state would save more tokens than this.
WORTH_ASKING = 64


@dataclass(eq=False, slots=True)
class Inquiry:
    """A state that a peer was asked for, and the Acquires that wait for the peer's answer."""

    ticket: int
    salt: str
    tokens: Tokens
    prefetch: int | None = None  # the ticket of the Prefetch that wants the state, whether or not an Acquire waits
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
        self,
        peers: Peers,
        store: CopyStore,
        ranking: Ranking,
        arrivals: Arrivals,
        prefetched: Callable[[int, str], None],
        least: int = WORTH_ASKING,
    ) -> None:
        """prefetched: answers the Prefetch of this ticket, with the reason why its state will not come, or "".

        least: a peer is asked only if its state would save more tokens than this.
        """
        self.counters: Counter[str] = Counter()
        self._peers, self._store, self._ranking, self._arrivals, self._least = peers, store, ranking, arrivals, least
        self._inquiries: dict[int, Inquiry] = {}  # by ticket
        self._asking: dict[int, Inquiry] = {}  # the inquiry that each Acquire waits for, by grant
        self._answered: set[int] = set()  # grants of parked Acquires that have had an answer
        self._landing: dict[int, int | None] = {}  # by key of a copy that is being read: the ticket of its Prefetch
        self._prefetched = prefetched

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
            if not inquiry.waiting and inquiry.prefetch is None:
                del self._inquiries[inquiry.ticket]
                self._peers.cancel(inquiry.ticket)

    def prefetch(self, prefetch: Prefetch, position: int) -> None:
        """Ask a peer for a state that no Acquire needs yet. position: the deepest state here on the path.

        The copy has all pages of its KV: what is in the pool now may be evicted before the state is used.
        """
        hint = PeerHint(prefetch.peer, count(prefetch.tokens))
        ticket = self._peers.ask(StateQuery(prefetch.salt, prefetch.tokens, position, 0, 0.0, 0, 0, hint))
        if ticket is None:
            self._prefetched(prefetch.ticket, "no link to the peer")
        else:
            self._inquiries[ticket] = Inquiry(ticket, prefetch.salt, prefetch.tokens, prefetch.ticket)

    def offered(self, offered: Offered) -> None:
        """Read an offered copy into host memory if there is room and nothing like it; otherwise give it up."""
        inquiry = self._end(offered.ticket)
        if inquiry is None:
            return  # It was cancelled while the offer was on its way.
        place = self._store.reserve_import(offered.salt, offered.tokens, offered.first_page)
        if place is None:
            self._peers.cancel(offered.ticket)
            self._fail(inquiry, "no room in host memory, or there is such a copy")
            return
        node, key = place
        for parked in inquiry.waiting:
            self._arrivals.wait_for(node, parked)
            parked.origin = "peer"
        self._landing[key] = inquiry.prefetch
        self._peers.pull(offered.ticket, key)

    def unoffered(self, unoffered: Unoffered) -> None:
        inquiry = self._end(unoffered.ticket)
        if inquiry is not None:
            self._fail(inquiry, unoffered.why)

    def loaded(self, loaded: Loaded, node: Node[StateCopy]) -> bool:
        """Note that a copy was read or could not be read; return False if it is not from a peer.

        node: the node of the copy
        """
        if loaded.key not in self._landing:
            return False
        prefetch = self._landing.pop(loaded.key)
        self._arrivals.loaded(node, loaded.error, "peer")
        if prefetch is not None:
            self._prefetched(prefetch, loaded.error)
        self.counters["peer_failed" if loaded.error else "peer_imports"] += 1
        return True

    def _end(self, ticket: int) -> Inquiry | None:
        """End an inquiry, and return it. The Acquires that waited for it do not ask again."""
        inquiry = self._inquiries.pop(ticket, None)
        for parked in inquiry.waiting if inquiry is not None else ():
            del self._asking[parked.acquire.grant]
            self._answered.add(parked.acquire.grant)
        return inquiry

    def _fail(self, inquiry: Inquiry, why: str) -> None:
        for parked in inquiry.waiting:
            parked.miss_reason = "peer"
            self.counters["peer_failed"] += 1
        if inquiry.prefetch is not None:
            self._prefetched(inquiry.prefetch, why)
