"""Which state bears a session's name: a node of the pool's tree, and a copy below it."""

from collections.abc import Callable

from baton.actors.actor import Send
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.radix import Node
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.lease import Lease
from baton.actors.messages import Kept


class Names:
    """The sessions' names: which node of the pool's tree, or which copy below, each session goes on from.

    A part of the cache. in_pool: the session's node; stored: its copy, used where there is no node. With neither it
    goes on from its tokens. With a node in the pool an older copy stays as long as it has a file, for after a kill.
    named: the nodes of in_pool. opened: the open sessions, and whether they have anything to go on from.
    renamed: called with a node when a name has come to it, or left it. claim, release: with copies that get a name, or
    are left without one.
    """

    def __init__(
        self,
        send: Send,
        renamed: Callable[[Node[Lease]], None],
        claim: Callable[[Node[StateCopy]], None],
        release: Callable[[Node[StateCopy]], None],
    ) -> None:
        self.opened: dict[str, bool] = {}
        self.in_pool: dict[str, Node[Lease]] = {}
        self.named: ByAge[Lease] = ByAge()
        self.stored: dict[str, Node[StateCopy]] = {}
        self._send = send
        self._renamed = renamed
        self._claim = claim
        self._release = release

    def bind_to_pool(self, session: str, node: Node[Lease]) -> None:
        self.unbind_from_pool(session)
        self.in_pool[session], self.opened[session] = node, True
        node.sessions.add(session)
        self.named.put(node, True)
        self._renamed(node)
        older = self.stored.get(session)
        if older is not None and (older.end >= node.end or copy_of(older).disk is Presence.ABSENT):
            self.unbind_from_store(session)
        self.report(session)

    def bind_to_store(self, session: str, node: Node[StateCopy]) -> None:
        self.unbind_from_pool(session)
        node.sessions.add(session)
        self._claim(node)
        if self.stored.get(session) is not node:
            self.unbind_from_store(session)
        self.stored[session] = node
        self.report(session)

    def unbind_from_pool(self, session: str) -> None:
        node = self.in_pool.pop(session, None)
        if node is not None:
            node.sessions.discard(session)
            self.named.put(node, bool(node.sessions))
            self._renamed(node)

    def lose(self, session: str) -> None:
        """Nothing is kept of it but its tokens."""
        self.unbind_from_pool(session)
        self.unbind_from_store(session)
        self.report(session)

    def close(self, session: str) -> None:
        if session in self.opened:
            del self.opened[session]
            self.unbind_from_pool(session)
            self.unbind_from_store(session)

    def lost_in_pool(self, node: Node[Lease]) -> None:
        """The state of this node is gone."""
        for session in sorted(node.sessions):
            self.unbind_from_pool(session)
            self.report(session)

    def lost_in_store(self, node: Node[StateCopy]) -> None:
        for session in sorted(node.sessions):
            node.sessions.discard(session)
            del self.stored[session]
            if session not in self.in_pool:
                self.report(session)

    def changed_in_store(self, node: Node[StateCopy]) -> None:
        for session in sorted(node.sessions - self.in_pool.keys()):
            self.report(session)

    def report(self, session: str) -> None:
        """Where its state is now; a copy that is still being made is told of when it is there."""
        pool, stored = self.in_pool.get(session), self.stored.get(session)
        if pool is not None:
            self._send("api", Kept(session, "slot", pool.end))
        elif stored is None:
            self._send("api", Kept(session, "tokens", 0))
        elif copy_of(stored).host is not Presence.COMING:
            self._send("api", Kept(session, copy_of(stored).tier, stored.end))

    def unbind_from_store(self, session: str) -> None:
        node = self.stored.pop(session, None)
        if node is not None:
            node.sessions.discard(session)
            if not node.sessions:
                self._release(node)
