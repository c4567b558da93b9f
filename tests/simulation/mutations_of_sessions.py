"""Known bugs in what keeps sessions: their names, the copies below the pool, files, and the way down and back."""

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
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.page_queue import PageQueue
from baton.actors.cache.radix import Node
from baton.actors.forward.actor import Forward
from baton.actors.lease import Lease
from baton.actors.messages import Admit, Export, Exported, Granted, Name, SaveFromReq, Step, Suspend, Unname
from baton.actors.scheduler.actor import Scheduler
from tests.simulation.disk import SimulatedDisk
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def filled_slot_is_the_copy(patch: Patch) -> None:
    """A slot that was filled and the copy that it came from are one: the turn writes in both, and so do two turns."""
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


def state_one_ahead_of_its_pages(patch: Patch) -> None:
    """A copy has the entries of one token fewer than its state has consumed."""
    original = HashDevice._export

    def export(self: HashDevice, key: int, slot: int, pages: list[int], position: int) -> None:
        original(self, key, slot, pages, position)
        copy = self.vault[key]
        self.vault[key] = replace(copy, entries=copy.entries[:-1], position=position - 1)

    patch(HashDevice, "_export", export)


def absent_slot_freed(patch: Patch) -> None:
    """When a session is closed the slot that its last turn was saved in is freed, whatever has become of it."""
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


def applied_twice_after_a_retraction(patch: Patch) -> None:
    """A turn that comes back is fed its last token once more, though the saved state has consumed it."""
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


def export_behind_the_slot_s_next_use(patch: Patch) -> None:
    """The slot is given back at once, and copied when it has its next holder."""
    original = Forward.receive

    def receive(self: Forward, message: Any) -> None:
        late = self.__dict__.setdefault("late", [])
        if isinstance(message, Export):
            self.device.exporting.add(message.key)  # type: ignore[attr-defined]
            late.append((message.key, message.state.slot, message.pages, message.position))
            self.send("cache", Exported(message.key, message.state))
            return
        original(self, message)
        if isinstance(message, Admit | Step):
            for key, *rest in late:
                self.device.exporting.discard(key)  # type: ignore[attr-defined]
                self.device.export(key, *rest)
            late.clear()

    patch(Forward, "receive", receive)


def pages_of_an_export_not_held(patch: Patch) -> None:
    """The pages of a state that is being copied may be freed and written over."""
    original = HostAndDisk._export

    def export(self: HostAndDisk, node: Node[Lease], lease: Lease, key: int) -> None:
        original(self, node, lease, key)
        self._pages.drop_grant_refs(self.exports[key])
        self.exports[key] = []

    patch(HostAndDisk, "_export", export)


def filled_before_it_is_loaded(patch: Patch) -> None:
    """A request is granted a copy that is still being read from its file."""
    original = CopyStore.load

    def bring(self: CopyStore, node: Node[StateCopy]) -> bool:
        brought = original(self, node)
        if brought:
            copy_of(node).host = Presence.PRESENT
        return brought

    patch(CopyStore, "load", bring)


def name_left_behind(patch: Patch) -> None:
    """After a turn the name stays where it was, if that state is still there."""
    original = Cache._name

    def name(self: Cache, account: Account) -> None:
        if account.session not in self.tiers.names.in_pool:
            original(self, account)

    patch(Cache, "_name", name)


def copy_dropped_under_way(patch: Patch) -> None:
    """A copy that a request is about to be filled from, or that is being written, may go."""
    patch(StateCopy, "busy", property(lambda self: self.host is Presence.COMING))


def file_of_a_copy_being_made(patch: Patch) -> None:
    """A file is written before the stream has made its copy."""
    patch(SimulatedDisk, "is_copy_under_way", lambda self, call: False)


def damaged_file_used(patch: Patch) -> None:
    """The checksum of a file is not looked at."""
    patch(SimulatedDisk, "is_damaged", lambda self, name: False)


def disk_cap_not_kept(patch: Patch) -> None:
    """A copy is written though the files take as much as they may."""
    patch(CopyStore, "_make_disk_room", lambda self, size: True)


def failed_write_believed(patch: Patch) -> None:
    """A file that could not be written counts as written."""
    original = CopyStore.written
    patch(CopyStore, "written", lambda self, key, error: original(self, key, ""))


def suspended_before_the_write(patch: Patch) -> None:
    """A suspension is answered as soon as the write has begun."""
    original = HostAndDisk._suspend

    def suspend(self: HostAndDisk, message: Suspend) -> bool:
        stored = self.names.stored.get(message.session)
        if message.session not in self.names.in_pool and stored is not None and copy_of(stored).disk is Presence.COMING:
            return self._answer(message, "disk", stored.end)
        return original(self, message)

    patch(HostAndDisk, "_suspend", suspend)


def fork_takes_the_state(patch: Patch) -> None:
    """Who is named on a state takes it from those who were named on it before."""
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


def name_overtakes_the_save(patch: Patch) -> None:
    """A session's name is moved while its last turn is still on its way to the tree."""
    original = HostAndDisk._carry_out

    def carry_out(self: HostAndDisk, command: Any) -> bool:
        turns = self._open_turns
        if isinstance(command, Name):
            self._open_turns = Counter()
        waits_for = original(self, command)
        self._open_turns = turns
        return waits_for

    patch(HostAndDisk, "_carry_out", carry_out)


def closed_session_named(patch: Patch) -> None:
    """A turn that ends after its session was closed is saved under its name all the same."""
    original = Cache._name

    def name(self: Cache, account: Account) -> None:
        self.tiers.names.opened[account.session] = None
        original(self, account)

    patch(Cache, "_name", name)


def copy_matched_past_the_limit(patch: Patch) -> None:
    """A copy at the very end of the prompt is used, and then there is nothing to feed."""
    original = CopyStore.match
    patch(CopyStore, "match", lambda self, salt, tokens, limit: original(self, salt, tokens, limit + 1))


def copy_kept_for_nobody(patch: Patch) -> None:
    """Copies of closed sessions stay."""
    patch(CopyStore, "release", lambda self, node: None)


def loan_of_a_copy_not_ended(patch: Patch) -> None:
    """A copy that a request was filled from counts as lent for ever."""
    original = Cache._end_loans

    def end_loans(self: Cache, account: Account) -> None:
        account.fill = None
        original(self, account)

    patch(Cache, "_end_loans", end_loans)


def filled_from_the_wrong_page_on(patch: Patch) -> None:
    """The entries of a copy come back one page too far on."""
    original = Forward._admit

    def admit(self: Forward, message: Admit) -> None:
        fill = message.fill
        if fill is not None and len(message.pages) > fill.first_page + 1:
            message.fill = replaced(fill, first_page=fill.first_page + 1)
        original(self, message)

    patch(Forward, "_admit", admit)


def failed_turn_keeps_its_place(patch: Patch) -> None:
    """The api is not told where a session's state is after a turn that took it along and failed."""
    original = Cache._leave_session

    def leave_session(self: Cache, account: Account) -> None:
        report, names = self.tiers.names.report, self.tiers.names
        names.report = lambda session: None if session in names.stored else report(session)  # type: ignore[method-assign]
        original(self, account)
        names.report = report  # type: ignore[method-assign]

    patch(Cache, "_leave_session", leave_session)


def word_of_short_pages_not_taken_back(patch: Patch) -> None:
    """A row that waits for a page counts as stuck while a state leaves the pool, and its pages with it."""
    original = PageQueue.give

    def give(self: PageQueue) -> None:
        send = self._send
        self._send = lambda to, sent: None if self._tiers.exporting and not sent.pages else send(to, sent)
        original(self)
        self._send = send

    patch(PageQueue, "give", give)


def turn_s_end_wakes_nobody(patch: Patch) -> None:
    """What was asked of a session during its turn is not tried again at its end."""
    original = Commands.wake

    def wake(self: Commands, key: Any) -> None:
        if not isinstance(key, str):
            original(self, key)

    patch(Commands, "wake", wake)


def write_wakes_nobody(patch: Patch) -> None:
    """A suspension that waits for its file is not tried again when that is written."""
    patch(CopyStore, "_end_of", lambda self, node: (self._queues.sort(node), self._forget_if_unused(node)))


def room_wakes_only_one(patch: Patch) -> None:
    """Of suspensions that wait for room in host memory the first is tried when there may be some, and no other."""
    original = Commands.act

    def act(self: Commands) -> None:
        wake = self.wake
        self.wake = lambda key: None  # type: ignore[method-assign]
        original(self)
        self.wake = wake  # type: ignore[method-assign]

    patch(Commands, "act", act)


def returned_copy_never_goes(patch: Patch) -> None:
    """A copy that a request was filled from is not in question any more when room is wanted."""

    def end_of(self: CopyStore, node: Node[StateCopy]) -> None:
        self._forget_if_unused(node)
        self._settled(node)

    patch(CopyStore, "_end_of", end_of)


def granted_a_state_that_was_lost(patch: Patch) -> None:
    """A state that had to go for the very request that was to go on from it is gone on from."""
    original = Allocator._state_slot

    def state_slot(self: Allocator, node: Node[Lease] | None, session: str) -> tuple[Lease | None, bool]:
        lease, moved = original(self, node, session)
        return lease or self._ledger.take("cache"), moved

    patch(Allocator, "_state_slot", state_slot)


def flush_leaves_the_copies(patch: Patch) -> None:
    """A flush forgets the tree, and what is in host memory and on disk is gone on from."""
    patch(CopyStore, "flush", lambda self: None)


def copy_that_was_not_made_is_kept(patch: Patch) -> None:
    """The cache does not hear that an export failed."""
    patch(CopyStore, "unmade", lambda self, key: None)
