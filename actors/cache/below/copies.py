"""Copies of states below the pool, in host memory and on disk: which there are, and what goes when there is no room."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from baton.actors.actor import Send
from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.below.ranking import Ranking
from baton.actors.cache.below.state_copy import CopyQueues, Presence, StateCopy, copy_of
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree, root_of, tokens_to
from baton.actors.cache.worth.lives import kind_after, superseded
from baton.actors.cache.worth.order import anyone
from baton.actors.kinds import Kind
from baton.actors.messages import Drop
from baton.actors.storage.disk import Disk, NoDisk
from baton.actors.tokens import Tokens, count


class CopyStore:
    """The copies of states in host memory and on disk, found by salt and tokens. A part of the cache.

    Each is the state of a node in a radix tree without pages. Without room the one that is worth least goes first.
    changed: called when a copy has come to another tier. gone: called when it is about to be forgotten.
    settled: called when something that was under way with it is over.
    Where limits.disk_bytes is 0 the disk is not used.
    """

    def __init__(
        self,
        limits: TierLimits,
        disk: Disk | None,
        send: Send,
        changed: Callable[[Node[StateCopy]], None],
        gone: Callable[[Node[StateCopy]], None],
        settled: Callable[[Node[StateCopy]], None],
        ranking: Ranking | None = None,
    ) -> None:
        self.limits = limits
        self._ranking = ranking or Ranking()
        self.tree: RadixTree[StateCopy] = RadixTree(PagePool(0, 1), self._ranking.clock)
        self.leaving: set[Node[StateCopy]] = set()
        self.host_bytes = self.disk_bytes = 0
        self.counters: Counter[str] = Counter()
        self._disk: Disk = disk if disk is not None and limits.disk_bytes else NoDisk()
        self._send, self._changed, self._gone, self._settled = send, changed, gone, settled
        self._host_copies = self._bytes_in_writing = 0
        self._queues = CopyQueues(lambda: self._ranking.of_copies(self.tree))
        self._coming: dict[int, Node[StateCopy]] = {}
        self._writing: dict[int, Node[StateCopy]] = {}
        self._keys = 0
        for file in self._disk.files():
            self._found(file.salt, file.tokens, file.size)

    @property
    def has_disk(self) -> bool:
        return self.limits.disk_bytes > 0

    @property
    def busy(self) -> bool:
        """Whether a file is being written or read, or a copy made."""
        return bool(self._coming or self._writing)

    def figures(self) -> dict[str, int]:
        """Copies, and the bytes that they take or are about to."""
        copies = [copy_of(node) for node in self.tree.states]
        return {
            "host": self._host_copies,
            "disk": sum(copy.in_file for copy in copies),
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
        }

    def can_hold(self, position: int) -> bool:
        """Whether a copy of so many tokens fits into host memory at all."""
        return self.limits.memory_bytes(position) <= self.limits.host_bytes

    # Finding

    def match(self, salt: str, tokens: Tokens, limit: int) -> Node[StateCopy] | None:
        """The deepest copy at or before `limit`, if something can come of it."""
        node = self.tree.deepest(salt, tokens, limit)
        return node if node is not None and not copy_of(node).lost else None

    def find(self, salt: str, tokens: Tokens) -> Node[StateCopy] | None:
        """The copy at exactly the end of these tokens."""
        node = self.match(salt, tokens, count(tokens))
        return node if node is not None and node.end == count(tokens) else None

    # Host memory

    def reserve(self, salt: str, tokens: Tokens, of: Node[Any] | None = None) -> tuple[Node[StateCopy], int] | None:
        """Where the copy of a state goes that has none yet, and its key; None if there is no room.

        of: the state's node in the pool. Without a name it displaces none that has one, and none that is worth more.
        """
        end = count(tokens)
        copy, there = self._new(end), self.tree.deepest(salt, tokens, end)
        is_taken = there is not None and there.end == end  # by one that is lost, but not gone yet
        above = there.end if there is not None else 0

        def may_go(other: Node[StateCopy]) -> bool:
            if of is None or of.sessions:
                return True
            age = self._ranking.age(of)
            return not other.sessions and self._queues.in_host_only.admits(of.kind, above, end, other, age)

        if is_taken or not self._make_host_room(copy.size, may_go):
            return None
        node = self._add(salt, tokens, copy)
        if of is not None:
            self.follow(node, of)
        self._come(node)
        return node, copy.key

    def follow(self, node: Node[StateCopy], of: Node[Any]) -> None:
        """This copy is all that is left of the state that the pool had at `of`."""
        node.kind, node.used, node.ended = of.kind, of.used, of.ended
        self._queues.sort(node, used=True)
        for step, kind in superseded(node):
            self._become(step, kind)

    def used(self, node: Node[StateCopy]) -> None:
        """A request goes on from this copy."""
        kind = kind_after(node)
        node.ways += 1
        self.tree.touch(node)
        self._become(node, kind)

    def _become(self, node: Node[StateCopy], kind: Kind) -> None:
        node.kind = kind
        self._queues.sort(node, used=True)

    def exported(self, key: int) -> None:
        """The copy under `key` has been made."""
        node = self._coming.pop(key)
        copy_of(node).host = Presence.PRESENT
        self._changed(node)
        self._end_of(node)

    def unmade(self, key: int) -> None:
        """The copy under `key` could not be made after all: what is not in a file is lost."""
        node = next((node for node in self.tree.states if copy_of(node).key == key and copy_of(node).in_host), None)
        if node is not None:
            self.counters["lost_copies"] += 1
            self._no_longer_in_host(node)  # Its entry stays: the disk may wait for it, and is told by that.
            (self._changed if copy_of(node).in_file else self._gone)(node)
            self._end_of(node)

    def load(self, node: Node[StateCopy]) -> bool:
        """Have the copy in host memory, now or soon; False if there is no room for it."""
        copy = copy_of(node)
        if copy.host is Presence.ABSENT:
            self.lend(node)  # it must not go to make room for itself
            room = copy.in_file and self._make_host_room(copy.size)
            copy.loans -= 1
            self._queues.sort(node)
            if not room:
                return False
            self._come(node)
            self._disk.read(copy.key, root_of(node).salt, tokens_to(node))
            self.counters["disk_reads"] += 1
        self.tree.touch(node)
        self._queues.sort(node, used=True)
        return True

    def loaded(self, key: int, error: str) -> Node[StateCopy]:
        """The file's copy is there; a file that cannot be read is gone for good. Returns its node."""
        node = self._coming.pop(key)
        copy = copy_of(node)
        if not error:
            copy.host = Presence.PRESENT
            self._changed(node)
        else:
            self.counters["damaged_files"] += 1
            self._no_longer_in_host(node)
            if copy.in_file:
                self._leave_disk(node)
            self._forget(node)
        self._end_of(node)
        return node

    def claim(self, node: Node[StateCopy]) -> None:
        """A session goes on from this copy."""
        copy_of(node).wanted = True
        self._become(node, Kind.NAMED)

    def lend(self, node: Node[StateCopy]) -> None:
        copy_of(node).loans += 1
        self._queues.sort(node)

    def end_loan(self, node: Node[StateCopy]) -> None:
        copy = node.state
        if copy is not None:
            copy.loans -= 1
            self._end_of(node)

    # Disk

    def write(self, node: Node[StateCopy]) -> bool:
        """Begin to write the copy, which is in host memory, to its file; False if there is no room."""
        copy = copy_of(node)
        if copy.disk is Presence.ABSENT:
            if not copy.in_host or not self._make_disk_room(copy.file_size, bool(node.sessions)):
                return False
            copy.disk = Presence.COMING
            self.disk_bytes += copy.file_size
            self._writing[copy.key] = node
            self._bytes_in_writing += copy.size
            self._queues.sort(node)
            self._disk.write(copy.key, root_of(node).salt, tokens_to(node))
            self.counters["disk_writes"] += 1
        return True

    def writing(self, key: int) -> Node[StateCopy]:
        """The copy that is being written under `key`."""
        return self._writing[key]

    def written(self, key: int, error: str) -> None:
        node = self._writing.pop(key)
        copy = copy_of(node)
        in_file = not error and not copy.flushed
        copy.disk = Presence.PRESENT if in_file else Presence.ABSENT
        copy.unwritable = bool(error)
        self._bytes_in_writing -= copy.size
        if error:
            self.counters["failed_writes"] += 1
            if not copy.flushed:  # Then it has been deleted, and another may be on its way under its name.
                self._disk.delete(root_of(node).salt, tokens_to(node))
        if not in_file:
            self.disk_bytes -= copy.file_size
        self._end_of(node)

    def drop_host(self, node: Node[StateCopy]) -> None:
        """Keep the file only, if nothing is under way."""
        copy = copy_of(node)
        if copy.in_host and copy.in_file and not copy.busy:
            self._leave_host(node)
            self._changed(node)

    def write_ahead(self) -> None:
        """Where host memory is three quarters full, write what has no file yet, so that it may go at once.

        The next to go, one at a time, if its file pays; for that no other file has to go, and what could not be written
        is not tried again.
        """
        if self.has_disk and not self._writing and self.host_bytes > self.limits.host_bytes * 3 // 4:
            node = self._queues.unwritten.least()
            has_room = node is not None and self.disk_bytes + copy_of(node).file_size <= self.limits.disk_bytes
            if node is not None and has_room and self._ranking.is_to_write(node):
                self.write(node)

    # Going

    def _end_of(self, node: Node[StateCopy]) -> None:
        """Something that was under way with this copy is over."""
        self._queues.sort(node)
        self._forget_if_unused(node)
        self._settled(node)

    def release(self, node: Node[StateCopy]) -> None:
        """No session goes on from this copy any more."""
        copy_of(node).wanted = False
        self._queues.sort(node)
        self._forget_if_unused(node)

    def flush(self) -> None:
        """Forget every copy. Its file is deleted now: what is written under that name from now on comes behind it.

        Where something is under way with a copy, it is out of reach, and goes when that is over: `leaving`.
        """
        for node in self.tree.clear():
            copy = copy_of(node)
            self._gone(node)
            copy.flushed, copy.wanted = True, False
            if copy.disk is not Presence.ABSENT:
                self._disk.delete(root_of(node).salt, tokens_to(node))
            if copy.in_file:
                self.disk_bytes -= copy.file_size
                copy.disk = Presence.ABSENT
            self.leaving.add(node)
            self._end_of(node)

    def ask_for_clearance(self, ticket: int) -> bool:
        """Have Cleared come when the disk has done all that it was asked for; False if there is no disk."""
        if self.has_disk:
            self._disk.clear(ticket)
        return self.has_disk

    def release_unnamed(self) -> None:
        """What no session has claimed: copies made for whoever asks, and files that were there at the start."""
        for node in list(self.tree.states):
            if not node.sessions:
                self.release(node)

    def _forget_if_unused(self, node: Node[StateCopy]) -> None:
        """What is neither in host memory nor on disk, or not wanted, is forgotten once nothing is under way with it."""
        copy = node.state
        if copy is None or copy.busy or (copy.wanted and (copy.host, copy.disk) != (Presence.ABSENT, Presence.ABSENT)):
            return
        self._forget(node)

    def _forget(self, node: Node[StateCopy]) -> None:
        copy = copy_of(node)
        self._gone(node)
        if copy.in_host:
            self._leave_host(node)
        if copy.in_file:
            self._leave_disk(node)
        if copy.flushed:
            node.state = None
            self.leaving.discard(node)
        else:
            self.tree.take_state(node)
        self._queues.sort(node)
        while not copy.flushed and node.parent is not None and not node.children and node.state is None:
            parent = node.parent
            self.tree.remove(node)
            node = parent

    def _leave_host(self, node: Node[StateCopy]) -> None:
        self._send("forward", Drop([copy_of(node).key]))
        self._no_longer_in_host(node)

    def _no_longer_in_host(self, node: Node[StateCopy]) -> None:
        copy = copy_of(node)
        copy.host = Presence.ABSENT
        self.host_bytes -= copy.size
        self._host_copies -= 1
        self._queues.sort(node)

    def _leave_disk(self, node: Node[StateCopy]) -> None:
        copy = copy_of(node)
        self._disk.delete(root_of(node).salt, tokens_to(node))
        copy.disk = Presence.ABSENT
        self.disk_bytes -= copy.file_size
        self._queues.sort(node)

    # Room

    def _make_host_room(self, size: int, may_go: Callable[[Node[StateCopy]], bool] = anyone) -> bool:
        """Make room: copies that have a file leave host memory, others are lost where no disk is to take them.

        Those that are being written make room a little later. may_go: the next to go only if it is true of it.
        """
        cap = self.limits.host_bytes
        if size > cap:
            return False
        while self.host_bytes + size > cap and (node := self._queues.in_both.least()) is not None and may_go(node):
            self._leave_host(node)
            self._changed(node)
        while self.host_bytes + size - self._bytes_in_writing > cap and (
            (node := self._queues.in_host_only.least()) is not None and may_go(node)
        ):
            is_to_write = self.has_disk and not copy_of(node).unwritable and self._ranking.is_to_write(node)
            if not (is_to_write and self.write(node)):
                self._forget(node)
        return self.host_bytes + size <= cap

    def _make_disk_room(self, size: int, named: bool = True) -> bool:
        """named: for one that has a name; for others none goes that has one."""
        cap = self.limits.disk_bytes
        while size <= cap < self.disk_bytes + size and (node := self._queues.in_file.least()) is not None:
            if node.sessions and not named:
                break
            if copy_of(node).in_host:
                self._leave_disk(node)
            else:
                self._forget(node)
        return self.disk_bytes + size <= cap

    def _found(self, salt: str, tokens: Tokens, size: int) -> None:
        """A file that was there at the start; there may be more than may stay."""
        if not self._make_disk_room(size):
            self._disk.delete(salt, tokens)
            return
        copy = self._new(count(tokens))
        copy.disk, copy.file_size = Presence.PRESENT, size
        self.disk_bytes += size
        self._queues.sort(self._add(salt, tokens, copy))

    def _new(self, position: int) -> StateCopy:
        return StateCopy(0, self.limits.memory_bytes(position), self.limits.file_bytes(position))

    def _add(self, salt: str, tokens: Tokens, copy: StateCopy) -> Node[StateCopy]:
        root = self.tree.match(salt, b"", 0).node
        node = self.tree.insert(root, tokens, [])
        self.tree.set_state(node, copy)
        return node

    def _come(self, node: Node[StateCopy]) -> None:
        """A copy is on its way to host memory, under a key that nothing on the stream still drops."""
        copy = copy_of(node)
        self._keys += 1
        copy.key, copy.host = self._keys, Presence.COMING
        self.host_bytes += copy.size
        self._coming[copy.key] = node
        self._host_copies += 1
        self._queues.sort(node)
