"""The way of a state out of the pool and back: names of sessions, copies in host memory, files."""

from collections import Counter
from collections.abc import Hashable

from baton.actors.actor import Send
from baton.actors.cache.commands import Awaited, Command, Commands
from baton.actors.cache.copies import CopyStore
from baton.actors.cache.limits import TierLimits
from baton.actors.cache.names import Names
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree, root_of, tokens_to
from baton.actors.cache.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.worth.lives import Lives
from baton.actors.cache.worth.order import Order
from baton.actors.cache.worth.ranking import Ranking
from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import Export, Exported, Loaded, Name, Suspend, Suspended, Unname
from baton.actors.requests import Tier
from baton.actors.storage.disk import Disk
from baton.actors.tokens import count

UNASKED = -1
# How many slots are kept at hand at most, and one of how many.
MOST_AT_HAND, SLOTS_AT_HAND = 4, 16


class Tiers:
    """Moves states out of the pool, to host memory and disk, and carries out Name, Unname and Suspend.

    A part of the cache. A state leaves with Export, which takes its lease to forward, and its pages are held until
    Exported: so neither is used again ahead of the copy. exports: the pages so held, by the copy's key.
    commands: those that are not carried out. at_hand: how many slots are kept free, as a copy takes a moment.
    """

    def __init__(
        self,
        send: Send,
        ledger: Ledger,
        pages: PagePool,
        tree: RadixTree[Lease],
        order: Order[Lease],
        lives: Lives,
        ranking: Ranking,
        limits: TierLimits,
        disk: Disk | None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._send, self._ledger, self._pages, self._tree, self._order = send, ledger, pages, tree, order
        self._lives, self._ranking = lives, ranking
        self.at_hand = max(1, min(MOST_AT_HAND, len(ledger.entries) // SLOTS_AT_HAND))
        self._open_turns: Counter[str] = Counter()
        self.commands = Commands(lambda command: self._carry_out(command))
        self.names = Names(
            send, lives.renamed, lambda node: self.store.claim(node), lambda node: self.store.release(node)
        )
        self.store = CopyStore(
            limits, disk, send, self.names.changed_in_store, self.names.lost_in_store, self._settled_below, ranking
        )
        self.exports: dict[int, list[int]] = {}
        self._refused: tuple[Node[Lease], int] | None = None

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing is waiting."""
        return self.commands.idle and not self._under_way

    @property
    def _under_way(self) -> bool:
        return bool(self.exports) or self.store.busy

    def act(self) -> None:
        """Carry out the commands that nothing is in the way of; keep within the slots that sessions may have."""
        self.commands.act()
        cap, named = self.store.limits.session_slots, self.names.named
        while cap is not None and len(named) > cap and (node := named.least()) is not None:
            if not self.demote(node, may_lose=not self.store.can_hold(node.end)):
                break
        self.store.write_ahead()

    def keep_slots_free(self) -> None:
        """Have some slots at hand where the next to go is to be copied."""
        while self._ledger.counts[Place.FREE] + len(self.exports) < self.at_hand:
            node = self._order.least(lambda node: not self._ledger.loans(_state(node)))
            if node is None or not self.is_to_copy(node) or self._refused == (node, self._tree.uses):
                return
            if not self.demote(node, may_lose=False):
                self._refused = node, self._tree.uses
                return

    def suspend_all(self) -> None:
        """Before the end: what has a name goes to its file, and what has none goes."""
        self._ranking.unnamed = False
        self.store.release_unnamed()
        if self.store.has_disk:
            for session in self.names.opened:
                self.commands.add(Suspend(UNASKED, session))

    # Down

    def is_to_copy(self, node: Node[Lease]) -> bool:
        """Whether a copy is made of a state as it leaves its slot."""
        return self._ranking.is_to_copy(node)

    def evict(self, node: Node[Lease]) -> None:
        """Let a state that is not lent leave its slot, at once or when its copy is made."""
        self._leave(node, self._place_below(node) if self.is_to_copy(node) else None)

    def demote(self, node: Node[Lease], may_lose: bool = True) -> bool:
        """Let a state leave its slot for host memory; False if that would lose it and may not, or it is lent."""
        if self._ledger.loans(_state(node)):
            return False
        place = self._place_below(node)
        if place is None and not may_lose:
            return False
        self._leave(node, place)
        return True

    def _place_below(self, node: Node[Lease]) -> tuple[Node[StateCopy], int | None] | None:
        """Where its copy is, or is to be made under a key; None if there is no room."""
        tokens, salt = tokens_to(node), root_of(node).salt
        below = self.store.find(salt, tokens)
        if below is None:
            return self.store.reserve(salt, tokens, node)
        self.store.follow(below, node)
        return below, None

    def _leave(self, node: Node[Lease], place: tuple[Node[StateCopy], int | None] | None) -> None:
        below, key = place or (None, None)
        self._lives.went(node, copied=below is not None)
        lease = self._tree.take_state(node)
        node.evicted = True
        if key is not None:
            self._export(node, lease, key)
        else:
            self._ledger.free(lease)
        if below is not None:
            self.counters["demotions_host"] += 1
            for session in sorted(node.sessions):
                self.names.bind_to_store(session, below)
        elif node.sessions:
            self.counters["demotions_tokens"] += 1
            self.names.lost_in_pool(node)

    def _export(self, node: Node[Lease], lease: Lease, key: int) -> None:
        self._ledger.uncache(lease, "cache")
        pages = self._tree.page_table(node)
        self._pages.add_grant_refs(pages)
        self.exports[key] = pages
        self._send("forward", Export(key, lease, list(pages), node.end))

    def exported(self, message: Exported) -> None:
        self._pages.drop_grant_refs(self.exports.pop(message.key))
        self._ledger.free(message.state)
        self.store.exported(message.key)

    def written(self, key: int, error: str) -> None:
        """Where it failed, the copy in host memory is the lowest that there is."""
        node = self.store.writing(key)
        waited = self.commands.take(node) if error else []
        self.store.written(key, error)
        for command in waited:
            if isinstance(command, Suspend) and self._goes_on_from(command.session, node):
                self._answer(command, "host", node.end)
            else:
                self.commands.add(command)

    def loaded(self, message: Loaded) -> Node[StateCopy]:
        """A file was read, or cannot be. Returns its node."""
        node = self.store.loaded(message.key, message.error)
        if message.seconds and not message.error:
            self._ranking.prices.measured_file(self.store.limits.file_bytes(node.end), message.seconds)
        return node

    def _goes_on_from(self, session: str, node: Node[StateCopy]) -> bool:
        return session not in self.names.in_pool and self.names.stored.get(session) is node

    # Commands

    def begin_turn(self, session: str) -> None:
        """An account of this session is open, which may move its name: commands wait for its end."""
        self._open_turns[session] += 1

    def end_turn(self, session: str) -> None:
        self._open_turns[session] -= 1
        if not self._open_turns[session]:
            del self._open_turns[session]
            self.commands.wake(session)

    def is_busy(self, session: str) -> bool:
        return session in self._open_turns

    def _settled_below(self, node: Node[StateCopy]) -> None:
        self.commands.wake(node)
        self.commands.wake(Awaited.ROOM)

    def _carry_out(self, command: Command) -> Hashable | None:
        """What it waits for, if it has to."""
        if self.is_busy(command.session):
            return command.session
        match command:
            case Name():
                self._name(command)
            case Unname(session):
                self.names.close(session)
            case Suspend():
                return self._suspend(command)
        return None

    def _name(self, name: Name) -> None:
        end = count(name.tokens)
        pool = self._tree.deepest(name.salt, name.tokens, end)
        stored = self.store.match(name.salt, name.tokens, end)
        self.names.opened[name.session] = end > 0
        if pool is not None and (stored is None or pool.end >= stored.end):
            if self.names.stored.get(name.session) is not stored:
                self.names.unbind_from_store(name.session)  # It is of a path that the session has left.
            self.names.bind_to_pool(name.session, pool)
        elif stored is not None:
            self.names.bind_to_store(name.session, stored)
        else:
            self.names.lose(name.session)

    def _suspend(self, suspend: Suspend) -> Hashable | None:
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
        """It waits for nothing more."""
        if suspend.ticket != UNASKED:
            self._send("api", Suspended(suspend.ticket, tier, position))
        return None


def _state(node: Node[Lease]) -> Lease:
    assert node.state is not None
    return node.state
