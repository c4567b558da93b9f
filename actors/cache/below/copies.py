"""The copies of states in host memory and on disk: which copies exist, and which are evicted when a tier is full."""

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

    Each copy is the state of a node in a radix tree without pages. When a tier is full, the copy of least worth is
    evicted first. From host memory it moves to a file if it has a session's name or if the file pays; otherwise it is
    dropped.

    Bytes are counted from the start of a copy, write or read until its result has left the tier again. So `host_bytes`
    and `disk_bytes` never exceed the limits, even while copies and files are being made.
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
        """changed: called when a copy has moved to another tier

        gone: called when a copy is about to be forgotten
        settled: called when a transfer or a loan of a copy has ended
        """
        self.limits = limits
        self._ranking = ranking or Ranking()
        self.tree: RadixTree[StateCopy] = RadixTree(PagePool(0, 1), self._ranking.clock)
        self.leaving: set[Node[StateCopy]] = set()  # flushed copies that are still lent, or being made or written
        self.host_bytes = self.disk_bytes = 0
        self.counters: Counter[str] = Counter()
        self._disk: Disk = disk if disk is not None and limits.disk_bytes else NoDisk()
        self._send, self._changed, self._gone, self._settled = send, changed, gone, settled
        self._host_copies = 0
        self._bytes_in_writing = 0  # host memory of copies whose files are being written; it can be freed afterwards
        self._queues = CopyQueues(lambda: self._ranking.of_copies(self.tree), lambda node: self.tree.note(node))
        self._coming: dict[int, Node[StateCopy]] = {}  # copies on their way to host memory, by key
        self._writing: dict[int, Node[StateCopy]] = {}  # copies that are being written to files, by key
        self._keys = 0
        for file in self._disk.files():
            self._register(file.salt, file.tokens, file.size)

    @property
    def has_disk(self) -> bool:
        return self.limits.disk_bytes > 0

    @property
    def busy(self) -> bool:
        """Whether any copy is being made, or any file written or read."""
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
        """Return whether a copy of a state at `position` would fit into empty host memory."""
        return self.limits.memory_bytes(position) <= self.limits.host_bytes

    # Finding

    def match(self, salt: str, tokens: Tokens, limit: int, pages: int = 0) -> Node[StateCopy] | None:
        """Return the deepest copy at or before `limit` on the path of `tokens`; None if there is none or it is lost.

        pages: number of leading pages whose KV the caller has, so that a copy may lack it
        """
        node = self.tree.deepest(salt, tokens, limit)
        while node is not None and (node.state is None or copy_of(node).first_page > pages):
            node = node.parent
        return node if node is not None and not copy_of(node).lost else None

    def find(self, salt: str, tokens: Tokens) -> Node[StateCopy] | None:
        """Return the copy at exactly the end of these tokens, or None."""
        node = self.match(salt, tokens, count(tokens))
        return node if node is not None and node.end == count(tokens) else None

    # Host memory

    def reserve(self, salt: str, tokens: Tokens, of: Node[Any] | None = None) -> tuple[Node[StateCopy], int] | None:
        """Reserve host memory for a new copy of a state; return the copy's node and key, or None if it does not fit.

        of: the state's node in the pool. If no session's name is on it, the new copy displaces no copy that has a name
            or is worth more.
        """
        end = count(tokens)
        deepest = self.tree.deepest(salt, tokens, end)
        above = deepest.end if deepest is not None else 0

        def may_go(other: Node[StateCopy]) -> bool:
            if of is None or of.sessions:
                return True
            age = self._ranking.age(of)
            return not other.sessions and self._queues.in_host_only.admits(of.kind, above, end, other, age)

        place = self._reserve(salt, tokens, self._new(end), may_go)
        if place is not None and of is not None:
            self.follow(place[0], of)
        return place

    def reserve_import(self, salt: str, tokens: Tokens, first_page: int) -> tuple[Node[StateCopy], int] | None:
        """Reserve host memory for a copy that comes from a peer; return its node and key, or None if it does not fit.

        The new copy displaces no copy that has a session's name. A copy without the KV of its first pages serves only
        the Acquires that already wait for it: it is never written to a file, and dropped when its loans have ended.
        """
        copy = self._new(count(tokens), first_page)
        copy.usable, copy.unwritable = first_page == 0, first_page > 0
        return self._reserve(salt, tokens, copy, lambda other: not other.sessions)

    def _reserve(
        self, salt: str, tokens: Tokens, copy: StateCopy, may_go: Callable[[Node[StateCopy]], bool]
    ) -> tuple[Node[StateCopy], int] | None:
        end, deepest = count(tokens), self.tree.deepest(salt, tokens, count(tokens))
        # A copy that failed but is still lent or being written occupies its node until the loan or write ends.
        is_taken = deepest is not None and deepest.end == end
        if is_taken or not self._make_host_room(copy.size, may_go):
            return None
        node = self._add(salt, tokens, copy)
        self._come(node)
        return node, copy.key

    def follow(self, node: Node[StateCopy], of: Node[Any]) -> None:
        """Give a copy the kind and age of the node `of` in the pool, whose state is evicted: only the copy remains."""
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
        """Note that the copy under `key` has failed after `Exported` reported it as made. Without a file it is lost."""
        node = next((node for node in self.tree.states if copy_of(node).key == key and copy_of(node).in_host), None)
        if node is not None:
            self.counters["lost_copies"] += 1
            # Send no Drop: it would delete the entry in host memory from which a waiting write learns of the failure.
            self._no_longer_in_host(node)
            (self._changed if copy_of(node).in_file else self._gone)(node)
            self._end_of(node)

    def load(self, node: Node[StateCopy]) -> bool:
        """Begin to read a copy from its file unless it is in host memory or coming; return False if it does not fit."""
        copy = copy_of(node)
        if copy.host is Presence.ABSENT:
            self.lend(node)  # so that freeing host memory for this copy does not forget the copy itself
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
        """Note that a file or a peer's copy was read, or forget the copy if that failed; return the copy's node."""
        node = self._coming.pop(key)
        copy = copy_of(node)
        if not error:
            copy.host = Presence.PRESENT
            self._changed(node)
        else:
            self._no_longer_in_host(node)
            if copy.in_file:
                self.counters["damaged_files"] += 1
                self._leave_disk(node)
            self._forget(node)
        self._end_of(node)
        return node

    def claim(self, node: Node[StateCopy]) -> None:
        """Note that a session's name was put on this copy."""
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
        """Begin to write a copy to a file unless it has one or is being written; return False if that is impossible.

        A write is impossible while the copy is not in host memory, or if its file does not fit on the disk.
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
        """Note that a write has ended. If it failed, the file is deleted, and only a Suspend has it written again."""
        node = self._writing.pop(key)
        copy = copy_of(node)
        in_file = not error and not copy.flushed
        copy.disk = Presence.PRESENT if in_file else Presence.ABSENT
        copy.unwritable = bool(error)
        self._bytes_in_writing -= copy.size
        if error:
            self.counters["failed_writes"] += 1
            # The flush has deleted the file of a flushed copy. A second delete could hit a newer file of the same name.
            if not copy.flushed:
                self._disk.delete(root_of(node).salt, tokens_to(node))
        if not in_file:
            self.disk_bytes -= copy.file_size
        self._end_of(node)

    def drop_host(self, node: Node[StateCopy]) -> None:
        """Drop a copy from host memory if it has a file, and is neither lent nor in transfer."""
        copy = copy_of(node)
        if copy.in_host and copy.in_file and not copy.busy:
            self._leave_host(node)
            self._changed(node)

    def write_ahead(self) -> None:
        """Write the copy that would be evicted next, if host memory is more than three quarters full.

        A written copy can be dropped at once when host memory is needed. One copy is written at a time, only if it has
        a name or its file pays, and only if no other file must be deleted for it. A failed write is not tried again.
        """
        if self.has_disk and not self._writing and self.host_bytes > self.limits.host_bytes * 3 // 4:
            node = self._queues.unwritten.least()
            has_room = node is not None and self.disk_bytes + copy_of(node).file_size <= self.limits.disk_bytes
            if node is not None and has_room and self._ranking.is_to_write(node):
                self.write(node)

    # Going

    def _end_of(self, node: Node[StateCopy]) -> None:
        """Update the queues after a transfer or loan of a copy has ended, and forget the copy if it is of no use."""
        self._queues.sort(node)
        self._forget_if_unused(node)
        self._settled(node)

    def release(self, node: Node[StateCopy]) -> None:
        """Drop a copy without a session's name, as soon as it is neither lent nor in transfer."""
        copy_of(node).usable = False
        self._queues.sort(node)
        self._forget_if_unused(node)

    def flush(self) -> None:
        """Forget every copy.

        Files are deleted now. The disk works in order, so a file that is written later under the same name stays. A
        copy that is lent or in transfer can no longer be found. It is in `leaving` until that ends.
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
        """Make the disk send Cleared(ticket) after all calls so far; return False if there is no disk."""
        if self.has_disk:
            self._disk.clear(ticket)
        return self.has_disk

    def release_unnamed(self) -> None:
        """Drop the copies without a name: those of states without a session, and files found at the start."""
        for node in list(self.tree.states):
            if not node.sessions:
                self.release(node)

    def _forget_if_unused(self, node: Node[StateCopy]) -> None:
        """Forget a copy that is in no tier or no longer usable, unless it is lent or in transfer."""
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
        """Evict copies from host memory until `size` bytes are free; return whether they are free now.

        Copies that also have a file are dropped first. Copies without a file are written, and dropped when the write
        has ended; if a file cannot be written or does not pay, the copy is forgotten. Bytes of copies that are being
        written count as soon to be free, so that no more copies are evicted than needed.

        may_go: whether a copy may be evicted; eviction stops at the first copy that may not
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
        """Delete files until `size` more bytes are within the disk limit; return whether they are.

        named: whether the new file is of a copy with a name; if not, no file of a copy with a name is deleted
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
        """Register a file that was found at the start, or delete it if it does not fit within the disk limit."""
        if not self._make_disk_room(size):
            self._disk.delete(salt, tokens)
            return
        copy = self._new(count(tokens))
        copy.disk, copy.file_size = Presence.PRESENT, size
        self.disk_bytes += size
        self._queues.sort(self._add(salt, tokens, copy))

    def _new(self, position: int, first_page: int = 0) -> StateCopy:
        limits = self.limits
        return StateCopy(0, limits.memory_bytes(position, first_page), limits.file_bytes(position), first_page)

    def _add(self, salt: str, tokens: Tokens, copy: StateCopy) -> Node[StateCopy]:
        root = self.tree.match(salt, b"", 0).node
        node = self.tree.insert(root, tokens, [])
        self.tree.set_state(node, copy)
        return node

    def _come(self, node: Node[StateCopy]) -> None:
        """Note that a copy is on its way to host memory.

        The copy gets a new key, because a Drop of its old key may still be in flight.
        """
        copy = copy_of(node)
        self._keys += 1
        copy.key, copy.host = self._keys, Presence.COMING
        self.host_bytes += copy.size
        self._coming[copy.key] = node
        self._host_copies += 1
        self._queues.sort(node)
