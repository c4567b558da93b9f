"""Acquires that the cache has not answered yet, and the copies of states that some of them wait for."""

from dataclasses import dataclass
from enum import Enum, auto

from baton.actors.cache.copies import CopyStore
from baton.actors.cache.radix import Node
from baton.actors.cache.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.worth.ranking import Ranking
from baton.actors.messages import Acquire
from baton.actors.requests import MissReason


class Wait(Enum):
    """What an Acquire waits for: slots and pages, a copy that is coming to host memory, or what another computes."""

    ALLOCATION = auto()
    COPY = auto()
    TOGETHER = auto()


@dataclass(eq=False, slots=True)
class Parked:
    """An Acquire that is not answered yet.

    awaits: the copy below the pool that it is to start from, on loan. read: that copy was read from disk.
    miss_reason: "damaged" if the file that it waited for cannot be read. overtaken: how many were granted past it.
    leader, waits_at: the grant that computes what it needs, and up to where. leaders: how many it has waited for.
    """

    acquire: Acquire
    awaits: Node[StateCopy] | None = None
    read: bool = False
    miss_reason: MissReason = ""
    overtaken: int = 0
    leader: int | None = None
    waits_at: int = 0
    leaders: int = 0


class Waiting:
    """The Acquires that are not answered yet, in order of arrival."""

    def __init__(self, store: CopyStore, ranking: Ranking) -> None:
        self._store, self._ranking = store, ranking
        self._parked: dict[int, Parked] = {}

    def park(self, acquire: Acquire) -> None:
        self._parked[acquire.grant] = Parked(acquire, overtaken=acquire.overtaken)

    def forget(self, grant: int) -> Parked | None:
        """It is answered or cancelled; None if there is none."""
        parked = self._parked.pop(grant, None)
        if parked is not None:
            self._let_go(parked)
        return parked

    def in_order(self) -> list[Parked]:
        """The most urgent first, those of one priority as they came."""
        return sorted(self._parked.values(), key=lambda parked: parked.acquire.priority)

    def copy_for(self, parked: Parked, position: int) -> Node[StateCopy] | None:
        """The copy to go on from, if one goes beyond `position`: lent, and on its way if it is not in host memory.

        A session's own always, others if they are brought back sooner than computed.
        """
        acquire, store = parked.acquire, self._store
        node = store.match(acquire.salt, acquire.tokens, acquire.limit)
        is_lent = node is not None and node is parked.awaits and copy_of(node).host is not Presence.ABSENT
        if node is not None and is_lent and node.end > position:
            return node  # Who waits asks again and again: that is one use.
        if node is None or node.end <= position or not self._is_wanted(parked, node, position) or not store.load(node):
            self._let_go(parked)
            return self.copy_for(parked, position) if node is not None and node.state is None else None
        if parked.awaits is not node:
            self._let_go(parked)
            store.lend(node)
            parked.awaits = node
        parked.read |= copy_of(node).host is Presence.COMING and copy_of(node).in_file
        return node

    def _is_wanted(self, parked: Parked, node: Node[StateCopy], position: int) -> bool:
        if node is parked.awaits or parked.acquire.session in node.sessions:
            return True
        return self._ranking.is_to_bring(node, position, in_host=copy_of(node).host is not Presence.ABSENT)

    def loaded(self, node: Node[StateCopy], error: str) -> None:
        """The copy is there, or never will be."""
        for parked in self._parked.values():
            if error and parked.awaits is node:
                parked.awaits, parked.miss_reason = None, "damaged"

    def _let_go(self, parked: Parked) -> None:
        if parked.awaits is not None:
            node, parked.awaits = parked.awaits, None
            self._store.end_loan(node)
