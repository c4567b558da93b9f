"""The tiers of the server: how states move between the pool, host memory and disk, and the commands about names."""

from collections import Counter
from collections.abc import Hashable, Iterable

from baton.actors.actor import Send
from baton.actors.cache.below.arrivals import Arrivals
from baton.actors.cache.below.commands import Awaited, Command, Commands
from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.imports import Imports
from baton.actors.cache.below.lending import Lending
from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.below.names import Names
from baton.actors.cache.below.ranking import Ranking
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.eviction import EvictionPolicy
from baton.actors.cache.radix import Match, Node, RadixTree, root_of, tokens_to
from baton.actors.cache.waiting import Parked
from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import (
    Cleared,
    Export,
    Exported,
    Flushed,
    Lend,
    Loaded,
    Message,
    Name,
    Offered,
    Speeds,
    Suspend,
    Suspended,
    Unlend,
    Unmade,
    Unname,
    Unoffered,
    Written,
)
from baton.actors.requests import Origin, Tier
from baton.actors.storage.disk import Disk
from baton.actors.storage.peers import Peers
from baton.actors.tokens import count

# The ticket of a Suspend that the cache itself issues while it drains. Such a Suspend gets no answer.
OWN_TICKET = -1
# One slot in 16 is kept free for requests, at least one and at most four.
SLOTS_PER_RESERVED, MOST_RESERVED = 16, 4


class HostAndDisk:
    """The Tiers of the server: move states between pool, host memory and files; carry out Name, Unname and Suspend.

    The way of a state from its slot to a file::

        cache ── Export (lease, pages) ──▶ forward          the pages are held, the state's node has no state any more
        cache ◀── Exported (lease) ─────── forward          slot and pages are free, the copy is in host memory
        cache ◀── Unmade ───────────────── forward          only if the copy failed after `Exported`
        cache ── write ──▶ disk ── Written ──▶ cache        the copy is in a file too, and may leave host memory

    The lease travels with `Export`, and the pages keep a reference as if a grant held them. So neither slot nor pages
    are used again before the copy is made. A request that needs such a slot waits for one lap of messages; therefore a
    few slots are emptied ahead of need (`slot_reserve`, `keep_slots_free`).
    """

    def __init__(
        self,
        send: Send,
        ledger: Ledger,
        tree: RadixTree[Lease],
        eviction: EvictionPolicy,
        ranking: Ranking,
        limits: TierLimits,
        disk: Disk | None,
        peers: Peers,
        worth_asking: int,
    ) -> None:
        self._counters: Counter[str] = Counter()
        self.slot_reserve = max(1, min(MOST_RESERVED, len(ledger.entries) // SLOTS_PER_RESERVED))
        self.ranking = ranking
        self.exports: dict[int, list[int]] = {}  # pages of each state that is being copied to host memory, by key
        self._send, self._ledger, self._tree, self._eviction = send, ledger, tree, eviction
        self._pages = tree.pages
        self._open_turns: Counter[str] = Counter()  # number of open grants of each session
        self.commands = Commands(lambda command: self._carry_out(command))
        self.names = Names(
            send, eviction.renamed, lambda node: self.store.claim(node), lambda node: self.store.release(node)
        )
        self.store = CopyStore(
            limits, disk, send, self.names.changed_in_store, self.names.lost_in_store, self._settled_below, ranking
        )
        self._arrivals = Arrivals(self.store, ranking)
        self.imports = Imports(peers, self.store, ranking, self._arrivals, worth_asking)
        self.lending = Lending(peers, self.store, tree, ledger, lambda node: self.demote(node, may_lose=False))
        # The state for whose copy `keep_slots_free` found no host memory, and the clock's value then. The state is not
        # tried again until the clock has advanced.
        self._refused: tuple[Node[Lease], int] | None = None
        self._draining = False

    @property
    def counters(self) -> Counter[str]:
        return self._counters + self.store.counters + self.imports.counters + self.lending.counters

    @property
    def exporting(self) -> bool:
        return bool(self.exports)

    @property
    def idle(self) -> bool:
        return self.commands.idle and not self._under_way

    @property
    def _under_way(self) -> bool:
        return bool(self.exports) or self.store.busy

    def figures(self) -> dict[str, int]:
        return self.store.figures()

    def receive(self, message: Message) -> None:
        match message:
            case Exported():
                self._exported(message)
            case Unmade(key):
                self.store.unmade(key)
            case Written(key, error):
                self._written(key, error)
            case Loaded():
                self._loaded(message)
            case Cleared(ticket):
                self._send("api", Flushed(ticket))
            case Speeds():
                self.ranking.prices.measured(message)
            case Name() | Unname() | Suspend():
                self.commands.add(message)
            case Lend():
                self.lending.ask(message)
                self.commands.add(message)
            case Unlend(ticket):
                if (lend := self.lending.end(ticket)) is not None:
                    self.commands.withdraw(lend)
            case Offered():
                self.imports.offered(message, is_wanted=not self._draining and not self._has(message))
            case Unoffered():
                self.imports.unoffered(message)
            case _:
                raise TypeError(f"cache got {message!r}")

    def act(self) -> None:
        """Carry out commands that can proceed, evict named states beyond `session_slots`, and write files ahead."""
        self.commands.act()
        cap, named = self.store.limits.session_slots, self.names.named
        while cap is not None and len(named) > cap and (node := named.least()) is not None:
            if not self.demote(node, may_lose=not self.store.can_hold(node.end)):
                break
        self.store.write_ahead()

    def keep_slots_free(self) -> None:
        """Evict states that need a copy, in order of eviction, until `slot_reserve` slots are free or soon will be.

        Stop at a state that needs no copy: its slot can be freed at once when a request needs it.
        """
        while self._ledger.counts[Place.FREE] + len(self.exports) < self.slot_reserve:
            node = self._eviction.next_to_evict(lambda node: not self._ledger.loans(_state(node)))
            if node is None or not self.is_to_copy(node) or self._refused == (node, self._tree.uses):
                return
            if not self.demote(node, may_lose=False):
                self._refused = node, self._tree.uses
                return

    def drain(self) -> None:
        """Begin to write every session's state to its file, and drop the copies without a session's name."""
        self._draining, self.ranking.unnamed = True, False
        self.store.release_unnamed()
        if self.store.has_disk:
            for session in self.names.opened:
                self.commands.add(Suspend(OWN_TICKET, session))

    # Down

    def is_to_copy(self, node: Node[Lease]) -> bool:
        return self.ranking.is_to_copy(node)

    def evict(self, node: Node[Lease]) -> None:
        self._leave(node, self._place_below(node) if self.is_to_copy(node) else None)

    def demote(self, node: Node[Lease], may_lose: bool = True) -> bool:
        """Move a state from its slot to host memory; return False if it is lent, or if its copy does not fit.

        may_lose: if the copy does not fit, drop the state and return True
        """
        if self._ledger.loans(_state(node)):
            return False
        place = self._place_below(node)
        if place is None and not may_lose:
            return False
        self._leave(node, place)
        return True

    def _place_below(self, node: Node[Lease]) -> tuple[Node[StateCopy], int | None] | None:
        """Return the node of a state's copy, and the key under which to make the copy; None if the copy does not fit.

        The key is None if the copy exists already.
        """
        tokens, salt = tokens_to(node), root_of(node).salt
        below = self.store.find(salt, tokens)
        if below is None:
            return self.store.reserve(salt, tokens, node)
        self.store.follow(below, node)
        return below, None

    def _leave(self, node: Node[Lease], place: tuple[Node[StateCopy], int | None] | None) -> None:
        """Take a state out of its slot. place: the result of `_place_below`; if it is None, the state is lost."""
        below, key = place or (None, None)
        self._eviction.evicted(node, copied=below is not None)
        lease = self._tree.take_state(node)
        node.evicted = True
        if key is not None:
            self._export(node, lease, key)
        else:
            self._ledger.free(lease)
        if below is not None:
            self._counters["demotions_host"] += 1
            for session in sorted(node.sessions):
                self.names.bind_to_store(session, below)
        elif node.sessions:
            self._counters["demotions_tokens"] += 1
            self.names.lost_in_pool(node)

    def _export(self, node: Node[Lease], lease: Lease, key: int) -> None:
        self._ledger.uncache(lease, "cache")
        pages = self._tree.page_table(node)
        self._pages.add_grant_refs(pages)
        self.exports[key] = pages
        self._send("forward", Export(key, lease, list(pages), node.end))

    def _exported(self, message: Exported) -> None:
        self._pages.drop_grant_refs(self.exports.pop(message.key))
        self._ledger.free(message.state)
        self.store.exported(message.key)

    def _written(self, key: int, error: str) -> None:
        """Note that a write has ended. If it failed, answer each Suspend that waited for it with "host"."""
        node = self.store.writing(key)
        commands = self.commands.take(node) if error else []
        self.store.written(key, error)
        for command in commands:
            if isinstance(command, Suspend) and self._resumes_from(command.session, node):
                self._answer(command, "host", node.end)
            else:
                self.commands.add(command)

    def _resumes_from(self, session: str, node: Node[StateCopy]) -> bool:
        return session not in self.names.in_pool and self.names.stored.get(session) is node

    def flush(self, nodes: Iterable[Node[Lease]]) -> None:
        for node in nodes:
            self.names.lost_in_pool(node)
        self.store.flush()

    def finish_flush(self, ticket: int) -> None:
        """Send Flushed at once if there is no disk. Otherwise `Cleared` triggers it, after all files were deleted."""
        if not self.store.ask_for_clearance(ticket):
            self._send("api", Flushed(ticket))

    # Up

    def copy_for(self, parked: Parked, match: Match[Lease]) -> Node[StateCopy] | None:
        pages = len(self._tree.whole_pages(match, parked.acquire.limit))
        return self._arrivals.copy_for(parked, match.node.end, pages)

    def waits_for_peer(self, parked: Parked, match: Node[Lease], copy: Node[StateCopy] | None) -> bool:
        position = copy.end if copy is not None else match.end
        return self.imports.waits(parked, position, self._whole_pages(match))

    def _whole_pages(self, node: Node[Lease]) -> int:
        """Return how many leading pages of KV a grant gets that resumes from this node's state in the pool."""
        return node.end // self._pages.size if self._tree.page_table(node) else 0

    def release(self, parked: Parked) -> None:
        self.imports.release(parked)
        self._arrivals.release(parked)

    def is_ready(self, copy: Node[StateCopy]) -> bool:
        return copy_of(copy).in_host

    def key(self, copy: Node[StateCopy]) -> int:
        return copy_of(copy).key

    def first_page(self, copy: Node[StateCopy]) -> int:
        return copy_of(copy).first_page

    def lend(self, copy: Node[StateCopy]) -> None:
        self.store.lend(copy)
        self.store.used(copy)

    def end_loan(self, copy: Node[StateCopy]) -> None:
        self.store.end_loan(copy)

    def loan_ended(self, node: Node[Lease]) -> None:
        self.commands.wake(node)

    def _loaded(self, message: Loaded) -> None:
        """Note that a file or a peer's copy was read, or that this failed."""
        node = self.store.loaded(message.key, message.error)
        if self.imports.loaded(message, node):
            if self._draining and node.state is not None and not node.sessions:
                self.store.release(node)  # It has come: a drain leaves only the copies of sessions.
            return
        if message.seconds and not message.error:
            self.ranking.prices.measured_file(self.store.limits.file_bytes(node.end), message.seconds)
        self._arrivals.loaded(node, message.error)

    def _has(self, offered: Offered) -> bool:
        """Return whether the pool has the offered state."""
        node = self._tree.deepest(offered.salt, offered.tokens, count(offered.tokens))
        return node is not None and node.end == count(offered.tokens)

    # Sessions

    def begin_turn(self, session: str, origin: Origin) -> None:
        self._open_turns[session] += 1
        if self.names.opened.get(session):
            self._counters[f"resumed_from_{origin}"] += 1

    def end_turn(self, session: str, last: Node[Lease] | None) -> None:
        """Wake the commands that waited for the turn's end, and report where the session's state is.

        If the session's state was moved to the turn, it has lost the name. If the turn has then cached no new state,
        the name stays on the session's copy, or is put on the deepest state of the turn's path if there is no copy.
        """
        self._open_turns[session] -= 1
        if not self._open_turns[session]:
            del self._open_turns[session]
            self.commands.wake(session)
        names = self.names
        if session in names.opened and session not in names.in_pool:
            if session not in names.stored and last is not None:
                names.bind_to_pool(session, last)
            names.report(session)

    def is_busy(self, session: str) -> bool:
        """Return whether a grant of this session is open: such a grant may move the session's name."""
        return session in self._open_turns

    def bind(self, session: str, node: Node[Lease]) -> None:
        if session in self.names.opened:
            self.names.bind_to_pool(session, node)

    def take_name(self, session: str, node: Node[Lease]) -> bool:
        if session not in node.sessions:
            return False
        self.names.unbind_from_pool(session)
        return True

    # Commands

    def _settled_below(self, node: Node[StateCopy]) -> None:
        """Wake the commands that wait for this copy, or for free host memory."""
        self.commands.wake(node)
        self.commands.wake(Awaited.ROOM)

    def _carry_out(self, command: Command) -> Hashable | None:
        """Carry out a command and return None, or return the key under which it has to wait (see Commands)."""
        if self.is_busy(command.session):
            return command.session
        match command:
            case Name():
                self._name(command)
            case Unname(session):
                self.names.close(session)
            case Suspend():
                return self._suspend(command)
            case Lend():
                return self.lending.carry_out(command, may_wait=self._under_way, draining=self._draining)
        return None

    def _name(self, name: Name) -> None:
        """Put a name on the deepest state or copy at or before the end of the command's tokens."""
        end = count(name.tokens)
        pool = self._tree.deepest(name.salt, name.tokens, end)
        stored = self.store.match(name.salt, name.tokens, end)
        self.names.opened[name.session] = end > 0
        if pool is not None and (stored is None or pool.end >= stored.end):
            if self.names.stored.get(name.session) is not stored:
                # The session has left the path of its copy, so the copy is of no use, even after a kill of the process.
                self.names.unbind_from_store(name.session)
            self.names.bind_to_pool(name.session, pool, name.ticket)
        elif stored is not None:
            self.names.bind_to_store(name.session, stored, name.ticket)
        else:
            self.names.lose(name.session, name.ticket)

    def _suspend(self, suspend: Suspend) -> Hashable | None:
        """Move a session's state from slot to host memory to disk as far as possible, and answer with its last tier.

        Return the key to wait under if the next move is not possible yet; `_suspend` is called again afterwards.
        """
        session = suspend.session
        pool = self.names.in_pool.get(session)
        if pool is not None:
            if self._ledger.loans(_state(pool)):
                return pool
            if not self.demote(pool, may_lose=False):
                return Awaited.ROOM if self._under_way else self._answer(suspend, "slot", pool.end)
        stored = self.names.stored.get(session)
        if stored is None:
            return self._answer(suspend, "tokens", 0)
        copy = copy_of(stored)
        if copy.host is Presence.COMING or copy.loans:
            return stored
        if not self.store.has_disk or not self.store.write(stored):
            return self._answer(suspend, "host", stored.end)
        if copy.disk is Presence.COMING:
            return stored
        self.store.drop_host(stored)
        return self._answer(suspend, "disk", stored.end)

    def _answer(self, suspend: Suspend, tier: Tier, position: int) -> Hashable | None:
        """Answer a Suspend; return None, because the command has nothing left to wait for."""
        if suspend.ticket != OWN_TICKET:
            self._send("api", Suspended(suspend.ticket, tier, position))
        return None


def _state(node: Node[Lease]) -> Lease:
    assert node.state is not None
    return node.state
