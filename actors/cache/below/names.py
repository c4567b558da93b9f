"""The names of sessions. Each is on a node of the pool's tree, on a copy below the pool, or on both."""

from collections.abc import Callable

from baton.actors.actor import Send
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.radix import Node
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.lease import Lease
from baton.actors.messages import Kept


class Names:
    """The record of what each session resumes from: a node of the pool's tree, else a copy, else its tokens.

    A session with a node in the pool may have an older copy too. That copy stays as long as it has a file, because
    after a kill of the process the session resumes from this file.
    """

    def __init__(
        self,
        send: Send,
        renamed: Callable[[Node[Lease]], None],
        claim: Callable[[Node[StateCopy]], None],
        release: Callable[[Node[StateCopy]], None],
    ) -> None:
        """renamed: called when a name was put on a node of the pool, or removed from it

        claim: called when a name was put on a copy
        release: called when the last name was removed from a copy
        """
        self.opened: dict[str, bool] = {}  # the open sessions, and whether they have any tokens
        self.in_pool: dict[str, Node[Lease]] = {}
        self.named: ByAge[Lease] = ByAge()  # the nodes of `in_pool`, by last use
        self.stored: dict[str, Node[StateCopy]] = {}
        self._send = send
        self._renamed = renamed
        self._claim = claim
        self._release = release

    def bind_to_pool(self, session: str, node: Node[Lease], ticket: int = 0) -> None:
        """Put a session's name on a state of the pool, and remove it from a copy that is not older or has no file."""
        self.unbind_from_pool(session)
        self.in_pool[session], self.opened[session] = node, True
        node.sessions.add(session)
        self.named.put(node, True)
        self._renamed(node)
        older = self.stored.get(session)
        if older is not None and (older.end >= node.end or copy_of(older).disk is Presence.ABSENT):
            self.unbind_from_store(session)
        self.report(session, ticket)

    def bind_to_store(self, session: str, node: Node[StateCopy], ticket: int = 0) -> None:
        """Put a session's name on a copy below the pool, and remove it from any state in the pool or other copy."""
        self.unbind_from_pool(session)
        node.sessions.add(session)
        self._claim(node)
        if self.stored.get(session) is not node:
            self.unbind_from_store(session)
        self.stored[session] = node
        self.report(session, ticket)

    def unbind_from_pool(self, session: str) -> None:
        node = self.in_pool.pop(session, None)
        if node is not None:
            node.sessions.discard(session)
            self.named.put(node, bool(node.sessions))
            self._renamed(node)

    def lose(self, session: str, ticket: int = 0) -> None:
        """Remove a session's name from its state and its copy: the session will resume from its tokens."""
        self.unbind_from_pool(session)
        self.unbind_from_store(session)
        self.report(session, ticket)

    def close(self, session: str) -> None:
        """Forget a session. Its copy is dropped if no other session's name is on it."""
        if session in self.opened:
            del self.opened[session]
            self.unbind_from_pool(session)
            self.unbind_from_store(session)

    def lost_in_pool(self, node: Node[Lease]) -> None:
        """Remove all names from a node of the pool whose state was evicted or flushed."""
        for session in sorted(node.sessions):
            self.unbind_from_pool(session)
            self.report(session)

    def lost_in_store(self, node: Node[StateCopy]) -> None:
        """Remove all names from a copy that is about to be forgotten."""
        for session in sorted(node.sessions):
            node.sessions.discard(session)
            del self.stored[session]
            if session not in self.in_pool:
                self.report(session)

    def changed_in_store(self, node: Node[StateCopy]) -> None:
        """Report the new tier of a copy for each session that resumes from it."""
        for session in sorted(node.sessions - self.in_pool.keys()):
            self.report(session)

    def report(self, session: str, ticket: int = 0) -> None:
        """Send Kept with the tier of a session's state. A copy in transit to host memory is reported when it arrives.

        ticket: the ticket of the Name that this answers. The answer does not wait for the copy's arrival.
        """
        pool, stored = self.in_pool.get(session), self.stored.get(session)
        if pool is not None:
            self._send("api", Kept(session, "slot", pool.end, ticket))
        elif stored is None:
            self._send("api", Kept(session, "tokens", 0, ticket))
        elif ticket or copy_of(stored).host is not Presence.COMING:
            self._send("api", Kept(session, copy_of(stored).tier, stored.end, ticket))

    def unbind_from_store(self, session: str) -> None:
        node = self.stored.pop(session, None)
        if node is not None:
            node.sessions.discard(session)
            if not node.sessions:
                self._release(node)
