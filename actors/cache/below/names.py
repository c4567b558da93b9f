"""The names of sessions, each on a node of the pool's tree, on a copy below it, or on both."""

from collections.abc import Callable

from baton.actors.actor import Send
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.radix import Node
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.lease import Lease
from baton.actors.messages import Kept


class Names:
    """The state from which each session resumes: a node of the pool's tree, or else a copy below, or else its tokens.

    A session with a node in the pool may have an older copy too: it stays as long as it has a file, because the file is
    what the session resumes from after the process is killed.
    """

    def __init__(
        self,
        send: Send,
        renamed: Callable[[Node[Lease]], None],
        claim: Callable[[Node[StateCopy]], None],
        release: Callable[[Node[StateCopy]], None],
    ) -> None:
        """renamed: called when a name has come to a node of the pool, or has left it.

        claim: called when a copy gets a name. release: called when a copy has lost its last one.
        """
        self.opened: dict[str, bool] = {}  # the open sessions, and whether they have any tokens
        self.in_pool: dict[str, Node[Lease]] = {}
        self.named: ByAge[Lease] = ByAge()  # the nodes of `in_pool`, by last use
        self.stored: dict[str, Node[StateCopy]] = {}
        self._send = send
        self._renamed = renamed
        self._claim = claim
        self._release = release

    def bind_to_pool(self, session: str, node: Node[Lease]) -> None:
        """Put a session's name on a state of the pool. Its copy loses the name, unless it is older and has a file."""
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
        """Put a session's name on a copy below the pool, and take it off the pool's state and any other copy."""
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
        """Take a session's name off everything: it resumes from its tokens."""
        self.unbind_from_pool(session)
        self.unbind_from_store(session)
        self.report(session)

    def close(self, session: str) -> None:
        """Forget a session. Copies without another name are dropped."""
        if session in self.opened:
            del self.opened[session]
            self.unbind_from_pool(session)
            self.unbind_from_store(session)

    def lost_in_pool(self, node: Node[Lease]) -> None:
        """Take all names off a node whose state is gone."""
        for session in sorted(node.sessions):
            self.unbind_from_pool(session)
            self.report(session)

    def lost_in_store(self, node: Node[StateCopy]) -> None:
        """Take all names off a copy that is about to be forgotten."""
        for session in sorted(node.sessions):
            node.sessions.discard(session)
            del self.stored[session]
            if session not in self.in_pool:
                self.report(session)

    def changed_in_store(self, node: Node[StateCopy]) -> None:
        """Report the sessions that resume from a copy which is in another tier now."""
        for session in sorted(node.sessions - self.in_pool.keys()):
            self.report(session)

    def report(self, session: str) -> None:
        """Send Kept: where a session's state is now. A copy that is still being made is reported when it is there."""
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
