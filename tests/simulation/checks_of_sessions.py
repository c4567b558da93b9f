"""Checks of session names and of copies below the pool: after each delivery, when nothing moves, and at the end."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from baton.actors.cache.actor import Cache
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.radix import Node, RadixTree, root_of, tokens_to
from baton.actors.cache.worth.by_age import ByAge
from baton.actors.messages import Kept, Lend, SaveFromReq, Suspended
from baton.actors.requests import Tier
from baton.actors.tokens import Tokens, unpack
from tests.simulation.disk import check_copy
from tests.simulation.sessions import Session

if TYPE_CHECKING:
    from tests.simulation.driver import Simulation


class SessionChecks:
    """Checks of names, copies, loans, bytes and queues in the tiers below the pool.

    A copy that was checked is not hashed again until its flags or its place change.
    """

    def __init__(self, simulation: "Simulation", cache: Cache) -> None:
        self._device = simulation.device
        self._disk = simulation.disk
        self._client = simulation.client
        self._limits = simulation.scenario.tiers
        self._cache = cache
        self._store = cache.tiers.store
        self._names = cache.tiers.names
        # For each copy, the facts with which it was last found right.
        self._right: dict[Node[StateCopy], tuple[object, ...]] = {}
        self._enabled = bool(simulation.scenario.talks or self._limits.host_bytes)

    def check(self) -> None:
        """Run all checks of the tiers. Called after every delivery to the cache."""
        if self._enabled:
            check_names(self._names.in_pool, self._cache.tree)
            check_names(self._names.stored, self._store.tree)
            self._check_loans()
            self._check_bytes()
            self._check_queues()
            for node in self._store.tree.states:
                self._check_copy(node, copy_of(node))

    def check_report(self, message: Kept | Suspended) -> None:
        """Check that the tier and position reported to the api are right, and that the state is really there."""
        session = message.session if isinstance(message, Kept) else self._client.sessions.suspending[message.ticket]
        tier, position, node = self._place(session)
        reported = (message.tier, message.position)
        assert reported == (tier, position), f"{message} is sent for {session}, which is at {tier}, {position}"
        if node is not None and tier == "disk":
            assert name_of(node) in self._disk.stored, f"{message}: {session} has no file"

    def check_save(self, save: SaveFromReq, epoch: int) -> None:
        """Check that the session's name is now on the state at the end of its turn.

        epoch: the epoch of the tree when the turn's account was opened
        """
        if save.position and save.session in self._names.opened and epoch == self._cache.tree.epoch:
            node = self._names.in_pool.get(save.session)
            at = node.end if node is not None else None
            assert at == save.position, f"{save.session} was saved at {save.position}, and its name is at {at}"

    def check_quiet(self, moving: bool) -> None:
        """Check what must hold while no message is in flight.

        moving: whether the device, the disk or a client still has something to do
        """
        if not self._enabled:
            return
        waiting = {command.session for command in self._cache.tiers.commands if not isinstance(command, Lend)}
        for session in self._client.sessions.open.values():
            if session.name not in waiting and not self._cache.tiers.is_busy(session.name):
                self._check_last_report(session)
        if not moving:
            assert not waiting, f"commands of {waiting} wait for nothing"
            self._check_nothing_leaked()

    def _check_last_report(self, session: Session) -> None:
        """Check that the last report to the api is still true, and that the session's name is on a state of its log."""
        tier, position, _ = self._place(session.name)
        report = session.last_report
        if not self._is_coming(session.name):
            assert report is not None, f"nothing was reported of {session.name}"
            assert (report.tier, report.position) == (tier, position), f"{report}, but it is {tier}, {position}"
        nodes: tuple[Node[Any] | None, ...] = (
            self._names.in_pool.get(session.name),
            self._names.stored.get(session.name),
        )
        # A running turn may have been given the state, so only sessions between turns are checked.
        for node in nodes if session.running is None else ():
            at = unpack(tokens_to(node)) if node is not None else []
            assert session.may_stand_at(at), f"{session.name} stands at {at}, its turns are {session.log}"

    def _check_nothing_leaked(self) -> None:
        """Check that host memory and disk hold only copies and files that the cache knows."""
        copies = [(node, copy_of(node)) for node in self._store.tree.states]
        assert not self._store.leaving, "a flushed copy stays, and nothing moves"
        assert not self._store.busy and not any(copy.busy for _, copy in copies), "a copy is busy, and nothing moves"
        assert self._device.vault.keys() == {copy.key for _, copy in copies if copy.in_host}
        assert self._disk.stored.keys() == {name_of(node) for node, copy in copies if copy.in_file}
        assert not self._client.sessions.suspending, f"not answered: {self._client.sessions.suspending}"
        assert not self._client.sessions.naming, f"names not answered: {self._client.sessions.naming}"

    def check_end(self, crashed: bool) -> None:
        """Check that no name and no copy is left after all sessions have been closed.

        crashed: whether the unit was restarted. If a session was closed during the restart, its file is found again
        without a name, and stays.
        """
        if self._enabled:
            names = self._names
            assert not names.opened and not names.in_pool and not names.stored, "a name is left"
            left = [name_of(node) for node in self._store.tree.states]
            assert crashed or not left, f"copies are left: {left}"
            assert self._cache.tiers.idle

    def _place(self, session: str) -> tuple[Tier, int, Node[StateCopy] | None]:
        pool, stored = self._names.in_pool.get(session), self._names.stored.get(session)
        if pool is not None:
            return "slot", pool.end, None
        return ("tokens", 0, None) if stored is None else (copy_of(stored).tier, stored.end, stored)

    def _is_coming(self, session: str) -> bool:
        stored = self._names.stored.get(session)
        return stored is not None and copy_of(stored).host is Presence.COMING

    def _check_loans(self) -> None:
        """Check that each copy is lent once to each request that waits for it or is filled from it, and to peers."""
        lent: Counter[Node[StateCopy]] = Counter()
        lent.update(account.fill for account in self._cache.accounts.values() if account.fill is not None)
        lent.update(self._cache.tiers.lending.nodes())
        lent.update(parked.awaits for parked in self._cache.waiting.in_order() if parked.awaits is not None)
        for node in (*self._store.tree.states, *self._store.leaving):
            assert copy_of(node).loans == lent.pop(node, 0), f"the loans of {node.id} are not its requests'"
        assert not any(node.state is not None for node in lent), "a copy that is not in the tree is lent"

    def _check_bytes(self) -> None:
        """Check that the bytes in host memory and on disk are counted correctly and are within their limits."""
        copies = [copy_of(node) for node in (*self._store.tree.states, *self._store.leaving)]
        host = sum(copy.size for copy in copies if copy.host is not Presence.ABSENT)
        disk = sum(copy.file_size for copy in copies if copy.disk is not Presence.ABSENT)
        assert self._store.host_bytes == host <= self._limits.host_bytes, f"{host} bytes in host memory"
        assert self._store.disk_bytes == disk <= self._limits.disk_bytes, f"{disk} bytes on disk"
        assert self._disk.bytes <= self._limits.disk_bytes, f"{self._disk.bytes} bytes in files"

    def _check_queues(self) -> None:
        """Check that each queue of copies holds exactly the copies that a scan of all copies finds.

        A queue by age must also return the oldest copy first.
        """
        queues = self._store._queues
        is_next: dict[str, Callable[[StateCopy], bool]] = {
            "in_both": lambda copy: copy.in_host and copy.in_file and not copy.busy,
            "in_host_only": lambda copy: copy.in_host and copy.disk is Presence.ABSENT and not copy.busy,
            "unwritten": lambda copy: (
                copy.in_host and copy.disk is Presence.ABSENT and copy.usable and not copy.unwritable
            ),
            "in_file": lambda copy: copy.in_file and not copy.busy,
        }
        for name, right in is_next.items():
            all_right = {node for node in self._store.tree.states if right(copy_of(node))}
            queue = getattr(queues, name)
            wrong = [node.id for node in self._store.tree.states if (node in queue) != (node in all_right)]
            assert not wrong, f"{wrong} are in {name} and should not be, or the other way round"
            if isinstance(queue, ByAge):
                first = min(all_right, key=lambda node: node.used, default=None)
                assert queue.least() is first, f"the first of {name} is not {first}"
            else:
                assert (queue.least() is None) == (not all_right), f"{name} is wrongly empty or wrongly not"

    def _check_copy(self, node: Node[StateCopy], copy: StateCopy) -> None:
        """Check that a copy is where its flags say, and that it holds the right state and KV entries."""
        there = self._device.vault.get(copy.key) if copy.host is Presence.PRESENT else None
        found = (copy.key, copy.host, copy.disk, copy.busy, id(there))
        if self._right.get(node) == found:
            return
        self._right[node] = found
        assert copy.host is not Presence.ABSENT or copy.disk is not Presence.ABSENT or copy.busy, (
            f"{node.id} is nowhere"
        )
        if copy.host is Presence.PRESENT:
            assert there is not None or copy.key in self._device.exporting | self._device.unmade, (
                f"copy {copy.key} is not there"
            )
            if there is not None:
                check_copy(there, tokens_to(node), self._device)
                size = self._device.page_size if self._device.entries else 0
                assert there.first == copy.first_page * size, f"copy {copy.key} begins at {there.first}"
        if copy.in_file and copy.host is not Presence.COMING:
            assert name_of(node) in self._disk.stored, f"the file of {unpack(tokens_to(node))} is not there"


def check_names(names: Mapping[str, Node[Any]], tree: RadixTree[Any]) -> None:
    """Check that each name is on exactly one node, and that this node has a state and lists the name."""
    for session, node in names.items():
        assert node in tree.states, f"{session} is at a node without a state"
        assert session in node.sessions, f"{session} is not among the names of its node"
    assert sum(len(node.sessions) for node in tree.nodes) == len(names), "a node has a name that is elsewhere"


def name_of(node: Node[StateCopy]) -> tuple[str, Tokens]:
    """Return the salt and the tokens that identify this copy's file."""
    return root_of(node).salt, tokens_to(node)
