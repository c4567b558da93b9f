"""The copies of states in host memory and on disk: which exist, and which go when there is no room."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from baton.actors.actor import Send
from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.below.ranking import Ranking
from baton.actors.cache.below.state_copy import CopyQueues, Presence, StateCopy, copy_of
from baton.actors.cache.eviction import any_node
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node, RadixTree, root_of, tokens_to
from baton.actors.cache.worth.lives import kind_after, superseded
from baton.actors.kinds import Kind
from baton.actors.messages import Drop
from baton.actors.storage.disk import Disk, NoDisk
from baton.actors.tokens import Tokens, count


class CopyStore:
    """The copies of states in host memory and on disk, found by salt and tokens.

    Each copy is the state of a node in a radix tree without pages. Where there is no room, copies go in order of worth,
    the least first: from host memory to a file, if it has a name or a file pays, or for good.

    A copy takes its bytes from the moment that it is begun until nothing is left of it: `host_bytes` and `disk_bytes`
    never exceed the limits, whatever is under way.
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
        """changed: called when a copy has come to another tier

        gone: called when a copy is about to be forgotten
        settled: called when something that was under way with a copy is over
        """
        self.limits = limits
        self._ranking = ranking or Ranking()
        self.tree: RadixTree[StateCopy] = RadixTree(PagePool(0, 1), self._ranking.clock)
        self.leaving: set[Node[StateCopy]] = set()  # flushed copies with which something is still under way
        self.host_bytes = self.disk_bytes = 0
        self.counters: Counter[str] = Counter()
        self._disk: Disk = disk if disk is not None and limits.disk_bytes else NoDisk()
        self._send, self._changed, self._gone, self._settled = send, changed, gone, settled
        self._host_copies = 0
        self._bytes_in_writing = 0  # of host memory, of copies that can leave it when their files are written
        self._queues = CopyQueues(lambda: self._ranking.of_copies(self.tree))
        self._coming: dict[int, Node[StateCopy]] = {}  # on their way to host memory, by key
        self._writing: dict[int, Node[StateCopy]] = {}  # being written to files, by key
        self._keys = 0
        for file in self._disk.files():
            self._register(file.salt, file.tokens, file.size)

    @property
    def has_disk(self) -> bool:
        return self.limits.disk_bytes > 0

    @property
    def busy(self) -> bool:
        """Whether a file is being written or read, or a copy made."""
        return bool(self._coming or self._writing)

    def figures(self) -> dict[str, int]:
        """Return how many copies each tier has, and the bytes that they take or are about to take."""
        copies = [copy_of(node) for node in self.tree.states]
        return {
            "host": self._host_copies,
            "disk": sum(copy.in_file for copy in copies),
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
        }

    def can_hold(self, position: int) -> bool:
        """Return whether a copy of a state at `position` fits into host memory at all."""
        return self.limits.memory_bytes(position) <= self.limits.host_bytes

    # Finding

    def match(self, salt: str, tokens: Tokens, limit: int) -> Node[StateCopy] | None:
        """Return the deepest copy at or before `limit` on the path of `tokens`; None if there is none or it is lost."""
        node = self.tree.deepest(salt, tokens, limit)
        return node if node is not None and not copy_of(node).lost else None

    def find(self, salt: str, tokens: Tokens) -> Node[StateCopy] | None:
        """Return the copy at exactly the end of these tokens."""
        node = self.match(salt, tokens, count(tokens))
        return node if node is not None and node.end == count(tokens) else None

    # Host memory

    def reserve(self, salt: str, tokens: Tokens, of: Node[Any] | None = None) -> tuple[Node[StateCopy], int] | None:
        """Make room for a copy of a state that has none; return its node and key, or None if there is no room.

        of: the state's node in the pool. If it has no name, its copy displaces none that has one or is worth more.
        """
        end = count(tokens)
        copy, deepest = self._new(end), self.tree.deepest(salt, tokens, end)
        # A copy that is lost, but that a loan or a write still holds, occupies the node until that is over.
        is_taken = deepest is not None and deepest.end == end
        above = deepest.end if deepest is not None else 0

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
        """Take over kind and age from the node `of` in the pool, whose state goes: this copy is what is left of it."""
        node.kind, node.used, node.ended = of.kind, of.used, of.ended
        self._queues.sort(node, used=True)
        for step, kind in superseded(node):
            self._become(step, kind)

    def used(self, node: Node[StateCopy]) -> None:
        """Note that a request resumes from this copy."""
        kind = kind_after(node)
        node.ways += 1
        self.tree.touch(node)
        self._become(node, kind)

    def _become(self, node: Node[StateCopy], kind: Kind) -> None:
        node.kind = kind
        self._queues.sort(node, used=True)

    def exported(self, key: int) -> None:
        """Note that the copy under `key` is in host memory now."""
        node = self._coming.pop(key)
        copy_of(node).host = Presence.PRESENT
        self._changed(node)
        self._end_of(node)

    def unmade(self, key: int) -> None:
        """Note that the copy under `key`, which was reported as made, failed. Without a file it is lost."""
        node = next((node for node in self.tree.states if copy_of(node).key == key and copy_of(node).in_host), None)
        if node is not None:
            self.counters["lost_copies"] += 1
            # No Drop is sent: a write may be waiting for this copy, and learns from its entry that it failed.
            self._no_longer_in_host(node)
            (self._changed if copy_of(node).in_file else self._gone)(node)
            self._end_of(node)

    def load(self, node: Node[StateCopy]) -> bool:
        """Read a copy from its file unless it is in host memory or on its way; return False if it does not fit."""
        copy = copy_of(node)
        if copy.host is Presence.ABSENT:
            self.lend(node)  # so that it does not go itself to make room
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
        """Note that a file was read, or that it cannot be and is forgotten; return the copy's node."""
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
        """Note that a session is named on this copy."""
        copy_of(node).usable = True
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
        """Begin to write a copy to its file unless it has one; return False if that cannot be done now.

        It cannot if the copy is not in host memory, or the disk has no room.
        """
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
        """Return the node of the copy that is being written under `key`."""
        return self._writing[key]

    def written(self, key: int, error: str) -> None:
        """Note that a write is over. A file that failed is deleted, and the copy is not written again."""
        node = self._writing.pop(key)
        copy = copy_of(node)
        in_file = not error and not copy.flushed
        copy.disk = Presence.PRESENT if in_file else Presence.ABSENT
        copy.unwritable = bool(error)
        self._bytes_in_writing -= copy.size
        if error:
            self.counters["failed_writes"] += 1
            # The file of a flushed copy was deleted by the flush, and a new one may be under way under its name.
            if not copy.flushed:
                self._disk.delete(root_of(node).salt, tokens_to(node))
        if not in_file:
            self.disk_bytes -= copy.file_size
        self._end_of(node)

    def drop_host(self, node: Node[StateCopy]) -> None:
        """Let a copy leave host memory if it has a file and nothing is under way with it."""
        copy = copy_of(node)
        if copy.in_host and copy.in_file and not copy.busy:
            self._leave_host(node)
            self._changed(node)

    def write_ahead(self) -> None:
        """Write the copy that would leave next, if host memory is more than three quarters full.

        Then it can leave at once when room is needed. One copy is written at a time, only if its file pays, and only if
        no other file is deleted for it. A copy that could not be written is not tried again.
        """
        if self.has_disk and not self._writing and self.host_bytes > self.limits.host_bytes * 3 // 4:
            node = self._queues.unwritten.least()
            has_room = node is not None and self.disk_bytes + copy_of(node).file_size <= self.limits.disk_bytes
            if node is not None and has_room and self._ranking.is_to_write(node):
                self.write(node)

    # Going

    def _end_of(self, node: Node[StateCopy]) -> None:
        """Sort a copy, or forget it, after something that was under way with it is over."""
        self._queues.sort(node)
        self._forget_if_unused(node)
        self._settled(node)

    def release(self, node: Node[StateCopy]) -> None:
        """Drop a copy that no session is named on any more, as soon as nothing is under way with it."""
        copy_of(node).usable = False
        self._queues.sort(node)
        self._forget_if_unused(node)

    def flush(self) -> None:
        """Forget every copy.

        Files are deleted now: the disk works in order, so a file that is written later under the same name stays. A
        copy with which something is under way can no longer be found, and is forgotten when that is over: `leaving`.
        """
        for node in self.tree.clear():
            copy = copy_of(node)
            self._gone(node)
            copy.flushed, copy.usable = True, False
            if copy.disk is not Presence.ABSENT:
                self._disk.delete(root_of(node).salt, tokens_to(node))
            if copy.in_file:
                self.disk_bytes -= copy.file_size
                copy.disk = Presence.ABSENT
            self.leaving.add(node)
            self._end_of(node)

    def ask_for_clearance(self, ticket: int) -> bool:
        """Have the disk send Cleared after all calls so far; return False if there is no disk."""
        if self.has_disk:
            self._disk.clear(ticket)
        return self.has_disk

    def release_unnamed(self) -> None:
        """Drop the copies without a name: those of states without a session, and files found at the start."""
        for node in list(self.tree.states):
            if not node.sessions:
                self.release(node)

    def _forget_if_unused(self, node: Node[StateCopy]) -> None:
        """Forget a copy that is in no tier or no longer usable, unless something is under way with it."""
        copy = node.state
        if copy is None or copy.busy or (copy.usable and (copy.host, copy.disk) != (Presence.ABSENT, Presence.ABSENT)):
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

    def _make_host_room(self, size: int, may_go: Callable[[Node[StateCopy]], bool] = any_node) -> bool:
        """Make room in host memory; return whether there are `size` bytes now.

        Copies with a file leave first. Then others are written, and leave when that is done, or are forgotten if they
        cannot be written or a file does not pay. Bytes that are being written count as room to come, so that no more
        copies go than needed.

        may_go: stop at the first copy for which it is false
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
        """Make room on disk by deleting files; return whether there are `size` bytes now.

        named: whether the room is for a copy with a name; for others no file of a copy with a name is deleted
        """
        cap = self.limits.disk_bytes
        while size <= cap < self.disk_bytes + size and (node := self._queues.in_file.least()) is not None:
            if node.sessions and not named:
                break
            if copy_of(node).in_host:
                self._leave_disk(node)
            else:
                self._forget(node)
        return self.disk_bytes + size <= cap

    def _register(self, salt: str, tokens: Tokens, size: int) -> None:
        """Register a file that was found at the start, or delete it if there is no room for it."""
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
        """Note that a copy is on its way to host memory.

        It gets a new key, because a Drop of its old one may still be under way.
        """
        copy = copy_of(node)
        self._keys += 1
        copy.key, copy.host = self._keys, Presence.COMING
        self.host_bytes += copy.size
        self._coming[copy.key] = node
        self._host_copies += 1
        self._queues.sort(node)
