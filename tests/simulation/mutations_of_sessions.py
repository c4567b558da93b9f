"""Planted bugs in sessions: their names, the copies below the pool, files, and the way of a state down and back."""

from collections import Counter
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replaced

from baton.actors.cache.account import Account
from baton.actors.cache.actor import Cache
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.below.commands import Commands
from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.cache.below.names import Names
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.page_queue import PageQueue
from baton.actors.cache.radix import Node
from baton.actors.forward.actor import Forward
from baton.actors.lease import Lease
from baton.actors.messages import Admit, Drop, Export, Exported, Granted, Name, SaveFromReq, Step, Suspend, Unname
from baton.actors.scheduler.actor import Scheduler
from tests.simulation.disk import SimulatedDisk
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def filled_slot_aliases_the_copy(patch: Patch) -> None:
    """Planted bug: a filled slot and the copy that it came from share memory, so the turn overwrites the copy."""
    fill, write = HashDevice._fill, HashDevice._write
    aliases: dict[tuple[int, int], int] = {}

    def fill_in_place(self: HashDevice, key: int, slot: int, pages: list[int], first: int) -> None:
        fill(self, key, slot, pages, first)
        aliases[id(self), slot] = key

    def write_both(self: HashDevice, slot: int, state: int) -> None:
        write(self, slot, state)
        key = aliases.get((id(self), slot))
        if key in self.vault:
            self.vault[key] = replace(self.vault[key], state=state)

    patch(HashDevice, "_fill", fill_in_place)
    patch(HashDevice, "_write", write_both)


def copy_lacks_the_last_entry(patch: Patch) -> None:
    """Planted bug: a copy holds the entries of one token fewer than its state has consumed."""
    original = HashDevice._export

    def export(self: HashDevice, key: int, slot: int, pages: list[int], position: int) -> None:
        original(self, key, slot, pages, position)
        copy = self.vault[key]
        self.vault[key] = replace(copy, entries=copy.entries[:-1], position=position - 1)

    patch(HashDevice, "_export", export)


def slot_freed_after_the_state_left(patch: Patch) -> None:
    """Planted bug: closing a session frees the slot of its last save, even if the state has since left that slot."""
    save, carry_out = Cache._save, HostAndDisk._carry_out

    def note(self: Cache, message: SaveFromReq) -> None:
        self.tiers.__dict__.setdefault("saved", {})[message.session] = message.state.slot
        save(self, message)

    def close(self: HostAndDisk, command: Any) -> bool:
        slot = self.__dict__.get("saved", {}).pop(command.session, None) if isinstance(command, Unname) else None
        if slot is not None:
            self._ledger.free(Lease(slot, self._ledger.entries[slot].generation, self._ledger))
        return carry_out(self, command)

    patch(Cache, "_save", note)
    patch(HostAndDisk, "_carry_out", close)


def last_token_fed_twice_after_a_retraction(patch: Patch) -> None:
    """Planted bug: a turn that resumes after a retraction is fed a token that its saved state has already consumed."""
    original = Scheduler._granted

    def granted(self: Scheduler, message: Granted) -> None:
        record = self.state.acquiring.get(message.grant)
        if (
            record is not None
            and record.request.session
            and record.predecessor is not None
            and message.hit.cached_tokens
        ):
            message.hit = replaced(message.hit, cached_tokens=message.hit.cached_tokens - 1)
        original(self, message)

    patch(Scheduler, "_granted", granted)


def export_after_the_next_use_of_its_slot(patch: Patch) -> None:
    """Planted bug: an exported slot is given back at once, and copied only after its next holder has started."""
    original = Forward.receive

    def receive(self: Forward, message: Any) -> None:
        late = self.__dict__.setdefault("late", [])
        if isinstance(message, Export):
            self.device.exporting.add(message.key)  # type: ignore[attr-defined]
            late.append((message.key, message.state.slot, message.pages, message.position))
            self.send("cache", Exported(message.key, message.state))
            return
        # A copy that is about to be used or dropped must exist.
        needs_copies = isinstance(message, Drop) or (isinstance(message, Admit) and message.fill is not None)
        if not needs_copies:
            original(self, message)
        if needs_copies or isinstance(message, Admit | Step):
            for key, *rest in late:
                self.device.exporting.discard(key)  # type: ignore[attr-defined]
                self.device.export(key, *rest)
            late.clear()
        if needs_copies:
            original(self, message)

    patch(Forward, "receive", receive)


def pages_of_an_export_released(patch: Patch) -> None:
    """Planted bug: the pages of a state that is being copied may be freed and overwritten."""
    original = HostAndDisk._export

    def export(self: HostAndDisk, node: Node[Lease], lease: Lease, key: int) -> None:
        original(self, node, lease, key)
        self._pages.drop_grant_refs(self.exports[key])
        self.exports[key] = []

    patch(HostAndDisk, "_export", export)


def filled_before_the_file_is_read(patch: Patch) -> None:
    """Planted bug: a request is granted a copy that is still being read from its file."""
    original = CopyStore.load

    def load(self: CopyStore, node: Node[StateCopy]) -> bool:
        loading = original(self, node)
        if loading:
            copy_of(node).host = Presence.PRESENT
        return loading

    patch(CopyStore, "load", load)


def name_not_moved_after_a_turn(patch: Patch) -> None:
    """Planted bug: after a turn the session's name stays on its old state, if that state is still in the pool."""
    original = Cache._name

    def name(self: Cache, account: Account) -> None:
        if account.session not in self.tiers.names.in_pool:
            original(self, account)

    patch(Cache, "_name", name)


def busy_copy_dropped(patch: Patch) -> None:
    """Planted bug: a copy may be dropped while a request waits to be filled from it, or while its file is written."""
    patch(StateCopy, "busy", property(lambda self: self.host is Presence.COMING))


def file_written_before_its_copy_is_made(patch: Patch) -> None:
    """Planted bug: a file is written before the stream has made the copy that the file should contain."""
    patch(SimulatedDisk, "is_copy_under_way", lambda self, call: False)


def damaged_file_used(patch: Patch) -> None:
    """Planted bug: the checksum of a file is not verified."""
    patch(SimulatedDisk, "is_damaged", lambda self, name: False)


def disk_limit_ignored(patch: Patch) -> None:
    """Planted bug: a file is written even when the files already fill the disk limit."""
    patch(CopyStore, "_make_disk_room", lambda self, size, named=True: True)


def failed_write_believed(patch: Patch) -> None:
    """Planted bug: a file that could not be written counts as written."""
    original = CopyStore.written
    patch(CopyStore, "written", lambda self, key, error: original(self, key, ""))


def suspension_answered_before_the_write(patch: Patch) -> None:
    """Planted bug: a suspension is answered when the write of its file begins instead of when it ends."""
    original = HostAndDisk._suspend

    def suspend(self: HostAndDisk, message: Suspend) -> bool:
        stored = self.names.stored.get(message.session)
        if message.session not in self.names.in_pool and stored is not None and copy_of(stored).disk is Presence.COMING:
            return self._answer(message, "disk", stored.end)
        return original(self, message)

    patch(HostAndDisk, "_suspend", suspend)


def fork_removes_other_names(patch: Patch) -> None:
    """Planted bug: putting a session's name on a state removes the names that other sessions have on it."""
    original = HostAndDisk._name

    def name(self: HostAndDisk, message: Name) -> None:
        original(self, message)
        for names in (self.names.in_pool, self.names.stored):
            node = names.get(message.session)
            for other in list(node.sessions) if node is not None else ():
                if other != message.session:
                    del names[other]
                    node.sessions.discard(other)

    patch(HostAndDisk, "_name", name)


def name_not_answered(patch: Patch) -> None:
    """Planted bug: a `Name` that finds a copy in transit to host memory gets no answer, only the copy's arrival."""
    original = Names.report

    def report(self: Names, session: str, ticket: int = 0) -> None:
        stored = self.stored.get(session)
        is_copy = session not in self.in_pool and stored is not None
        original(self, session, 0 if is_copy and copy_of(stored).host is Presence.COMING else ticket)

    patch(Names, "report", report)


def name_overtakes_the_save(patch: Patch) -> None:
    """Planted bug: a `Name` is carried out while the state of the session's last turn is on its way to the tree."""
    original = HostAndDisk._carry_out

    def carry_out(self: HostAndDisk, command: Any) -> bool:
        turns = self._open_turns
        if isinstance(command, Name):
            self._open_turns = Counter()
        waits_for = original(self, command)
        self._open_turns = turns
        return waits_for

    patch(HostAndDisk, "_carry_out", carry_out)


def turn_of_a_closed_session_named(patch: Patch) -> None:
    """Planted bug: a turn that ends after its session was closed still puts the session's name on its state."""
    original = Cache._name

    def name(self: Cache, account: Account) -> None:
        self.tiers.names.opened[account.session] = None
        original(self, account)

    patch(Cache, "_name", name)


def copy_matched_past_the_limit(patch: Patch) -> None:
    """Planted bug: a copy at the very end of the prompt is used, which leaves no token to feed."""
    original = CopyStore.match

    def match(self: CopyStore, salt: str, tokens: bytes, limit: int, pages: int = 0) -> Node[StateCopy] | None:
        return original(self, salt, tokens, limit + 1, pages)

    patch(CopyStore, "match", match)


def copy_of_a_closed_session_stays(patch: Patch) -> None:
    """Planted bug: closing a session does not release its copy."""
    patch(CopyStore, "release", lambda self, node: None)


def loan_of_a_copy_never_ends(patch: Patch) -> None:
    """Planted bug: a copy that a request was filled from counts as lent for ever."""
    original = Cache._end_loans

    def end_loans(self: Cache, account: Account) -> None:
        account.fill = None
        original(self, account)

    patch(Cache, "_end_loans", end_loans)


def filled_one_page_too_late(patch: Patch) -> None:
    """Planted bug: a fill writes the entries of a copy one page too far along the row's pages."""
    original = Forward._admit

    def admit(self: Forward, message: Admit) -> None:
        fill = message.fill
        if fill is not None and len(message.pages) > fill.first_page + 1:
            message.fill = replaced(fill, first_page=fill.first_page + 1)
        original(self, message)

    patch(Forward, "_admit", admit)


def failed_turn_not_reported(patch: Patch) -> None:
    """Planted bug: a turn that took its session's state along fails, and the api does not get the new position."""
    original = Cache._leave_session

    def leave_session(self: Cache, account: Account) -> None:
        report, names = self.tiers.names.report, self.tiers.names
        names.report = lambda session, *_: None if session in names.stored else report(session)  # type: ignore[method-assign]
        original(self, account)
        names.report = report  # type: ignore[method-assign]

    patch(Cache, "_leave_session", leave_session)


def row_called_stuck_during_an_export(patch: Patch) -> None:
    """Planted bug: a row that waits for a page counts as stuck although a state and its pages are leaving the pool."""
    original = PageQueue.give

    def give(self: PageQueue) -> None:
        send = self._send
        self._send = lambda to, sent: None if self._tiers.exporting and not sent.pages else send(to, sent)
        original(self)
        self._send = send

    patch(PageQueue, "give", give)


def end_of_a_turn_wakes_no_command(patch: Patch) -> None:
    """Planted bug: commands that wait for the end of a session's turn are not tried again when the turn ends."""
    original = Commands.wake

    def wake(self: Commands, key: Any) -> None:
        if not isinstance(key, str):
            original(self, key)

    patch(Commands, "wake", wake)


def end_of_a_write_wakes_no_command(patch: Patch) -> None:
    """Planted bug: a suspension that waits for its file is not tried again when the file has been written."""
    patch(CopyStore, "_end_of", lambda self, node: (self._queues.sort(node), self._forget_if_unused(node)))


def room_wakes_one_command_only(patch: Patch) -> None:
    """Planted bug: when host memory becomes free, only the first of the suspensions that wait for it is tried again."""
    original = Commands.act

    def act(self: Commands) -> None:
        wake = self.wake
        self.wake = lambda key: None  # type: ignore[method-assign]
        original(self)
        self.wake = wake  # type: ignore[method-assign]

    patch(Commands, "act", act)


def returned_copy_never_evicted(patch: Patch) -> None:
    """Planted bug: after a request was filled from a copy, the copy is never evicted again."""

    def end_of(self: CopyStore, node: Node[StateCopy]) -> None:
        self._forget_if_unused(node)
        self._settled(node)

    patch(CopyStore, "_end_of", end_of)


def evicted_state_granted(patch: Patch) -> None:
    """Planted bug: a grant resumes from the state that was evicted to make room for it."""
    original = Allocator._state_slot

    def state_slot(self: Allocator, node: Node[Lease] | None, session: str) -> tuple[Lease | None, bool]:
        lease, moved = original(self, node, session)
        return lease or self._ledger.take("cache"), moved

    patch(Allocator, "_state_slot", state_slot)


def flush_keeps_the_copies(patch: Patch) -> None:
    """Planted bug: a flush empties the tree, but copies in host memory and on disk can still be resumed from."""
    patch(CopyStore, "flush", lambda self: None)


def unmade_copy_kept(patch: Patch) -> None:
    """Planted bug: the cache ignores `Unmade`, and keeps a copy whose export failed."""
    patch(CopyStore, "unmade", lambda self, key: None)
