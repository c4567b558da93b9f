"""The copies below the pool, without the pool: limits, order of eviction, writing ahead, and copies in use."""

from dataclasses import replace

from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.below.state_copy import Presence, StateCopy, copy_of
from baton.actors.cache.radix import Node, tokens_to
from baton.actors.messages import Drop, Message
from baton.actors.storage.disk import StateFile
from baton.actors.storage.lines import HostLines
from baton.actors.tokens import Tokens, count, pack, unpack

STATE = 100
FILE = TierLimits(state_bytes=STATE).file_bytes(1)


class NotedDisk:
    """A disk that records its calls."""

    def __init__(self, found: list[StateFile]) -> None:
        self.found = found
        self.written: list[list[int]] = []
        self.read_in: list[list[int]] = []
        self.deleted: list[list[int]] = []

    def files(self) -> list[StateFile]:
        return self.found

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        self.written.append(unpack(tokens))

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        self.read_in.append(unpack(tokens))

    def delete(self, salt: str, tokens: Tokens) -> None:
        self.deleted.append(unpack(tokens))

    def clear(self, ticket: int) -> None:
        raise AssertionError("nothing is flushed")


class Bench:
    """A copy store that fits `host` one-token copies in host memory and `files` files on disk."""

    def __init__(self, host: int, files: int = 0, found: tuple[int, ...] = ()) -> None:
        self.sent: list[Message] = []
        self.gone: list[list[int]] = []
        self.changed: list[list[int]] = []
        self.disk = NotedDisk([StateFile("", pack([token]), FILE) for token in found])
        limits = TierLimits(host * STATE, files * FILE, STATE)
        self.store = CopyStore(
            limits,
            self.disk,
            lambda to, message: self.sent.append(message),
            lambda node: self.changed.append(unpack(tokens_to(node))),
            lambda node: self.gone.append(unpack(tokens_to(node))),
            lambda node: None,
        )

    def begin(self, token: int) -> Node[StateCopy]:
        reserved = self.store.reserve("", pack([token]))
        assert reserved is not None, "there is no room"
        return reserved[0]

    def add(self, token: int) -> Node[StateCopy]:
        """Add a completed copy of a session's state."""
        node = self.begin(token)
        node.sessions.add(f"s{token}")
        self.store.exported(copy_of(node).key)
        return node

    def write(self, token: int, error: str = "") -> Node[StateCopy]:
        """Write a copy to its file, and report the write as finished."""
        node = self.node(token)
        assert self.store.write(node)
        self.store.written(copy_of(node).key, error)
        return node

    def node(self, token: int) -> Node[StateCopy]:
        node = self.store.find("", pack([token]))
        assert node is not None
        return node

    def tiers(self) -> dict[int, str]:
        """Return where each copy is, by its token: h for host memory, d for disk.

        A capital means that it is still arriving.
        """
        found = {}
        for node in self.store.tree.states:
            copy = copy_of(node)
            host = {Presence.COMING: "H", Presence.PRESENT: "h"}.get(copy.host, "")
            disk = {Presence.COMING: "D", Presence.PRESENT: "d"}.get(copy.disk, "")
            found[unpack(tokens_to(node))[0]] = host + disk
        return dict(sorted(found.items()))

    def figures(self) -> tuple[int, int, int, int]:
        figures = self.store.figures()
        return (
            figures["host"],
            figures["disk"],
            figures["host_bytes"] // STATE,
            figures["disk_bytes"] // FILE,
        )


def test_what_a_copy_takes() -> None:
    limits = TierLimits(state_bytes=1000, token_bytes=10)
    assert limits.memory_bytes(7) == 1070
    assert limits.file_bytes(7) == 1070 + 7 * 4 + 8192, "the state, its KV, its tokens, and a header"
    whole = replace(limits, page_size=16)
    assert [whole.memory_bytes(at) for at in (0, 1, 16, 17)] == [1000, 1160, 1160, 1320]
    cut = replace(whole, lines=HostLines(340, 1000, 160))
    assert [cut.memory_bytes(at) for at in (0, 1, 32, 33)] == [3 * 340, 4 * 340, 4 * 340, 5 * 340]
    assert cut.file_bytes(7) == limits.file_bytes(7)


def test_a_copy_fits_that_takes_all_of_host_memory() -> None:
    store = CopyStore(TierLimits(1070, 0, 1000, 10), None, *[lambda *arguments: None] * 4)
    assert store.can_hold(7) and not store.can_hold(8)
    assert store.reserve("", pack(range(8))) is None
    assert store.reserve("", pack(range(7))) is not None


def test_without_a_disk_the_least_recently_used_copy_is_lost() -> None:
    bench = Bench(2)
    for token in (1, 2):
        bench.add(token)
    bench.store.load(bench.node(1))
    bench.add(3)
    assert bench.tiers() == {1: "h", 3: "h"} and bench.gone == [[2]]
    assert bench.figures() == (2, 0, 2, 0)
    assert len([message for message in bench.sent if isinstance(message, Drop)]) == 1


def test_a_copy_that_is_lent_or_coming_stays() -> None:
    bench = Bench(2)
    bench.store.lend(bench.add(1))
    bench.begin(2)
    assert bench.store.reserve("", pack([3])) is None
    bench.store.end_loan(bench.node(1))
    bench.add(3)
    assert bench.tiers() == {2: "H", 3: "h"}


def test_copies_with_a_file_leave_host_memory_first() -> None:
    bench = Bench(2, files=9)
    for token in (1, 2):
        bench.add(token)
    bench.write(2)
    bench.changed.clear()
    bench.add(3)
    assert bench.tiers() == {1: "h", 2: "d", 3: "h"}, "the older one has no file"
    assert bench.changed == [[2], [3]] and not bench.gone
    assert bench.figures() == (2, 1, 2, 1)


def test_no_more_copies_go_than_necessary() -> None:
    bench = Bench(3, files=9)
    for token in (1, 2, 3):
        bench.add(token)
        bench.write(token)
    bench.add(4)
    assert bench.tiers() == {1: "d", 2: "hd", 3: "hd", 4: "h"}
    small = Bench(3)
    for token in (1, 2, 3):
        small.add(token)
    small.add(4)
    assert small.tiers() == {2: "h", 3: "h", 4: "h"}


def test_if_no_copy_has_a_file_the_oldest_is_written_and_the_new_one_waits() -> None:
    bench = Bench(2, files=9)
    for token in (1, 2):
        bench.add(token)
    assert bench.store.reserve("", pack([3])) is None
    assert bench.tiers() == {1: "hD", 2: "h"}, "one is on its way, which is enough"
    assert bench.store.reserve("", pack([3])) is None and bench.disk.written == [[1]]
    assert bench.store.busy
    bench.store.written(copy_of(bench.node(1)).key, "")
    assert not bench.store.busy
    bench.add(3)
    assert bench.tiers() == {1: "d", 2: "h", 3: "h"}


def test_a_copy_that_cannot_be_written_is_lost_when_there_is_no_room() -> None:
    bench = Bench(1, files=9)
    bench.add(1)
    bench.write(1, error="no space left")
    assert bench.tiers() == {1: "h"} and bench.figures() == (1, 0, 1, 0)
    assert bench.store.counters["failed_writes"] == 1 and bench.disk.deleted == [[1]], "whatever is there of it"
    bench.add(2)
    assert bench.tiers() == {2: "h"} and bench.gone == [[1]] and bench.disk.written == [[1]]
    bench.write(2)
    assert not copy_of(bench.node(2)).unwritable


def test_a_copy_that_never_fits_displaces_nothing() -> None:
    bench = Bench(1, files=1)
    bench.add(1)
    bench.write(1)
    bench.store.limits = TierLimits(STATE, FILE, 2 * STATE)
    assert bench.store.reserve("", pack([2])) is None
    assert bench.tiers() == {1: "hd"}


# Files


def test_files_keep_to_their_limit_and_the_least_recently_used_is_deleted() -> None:
    bench = Bench(3, files=2)
    for token in (1, 2, 3):
        bench.add(token)
    bench.write(1)
    bench.write(2)
    bench.store.drop_host(bench.node(1))
    bench.store.drop_host(bench.node(2))
    bench.store.tree.touch(bench.node(1))
    bench.write(3)
    assert bench.tiers() == {1: "d", 3: "hd"} and bench.gone == [[2]] and bench.disk.deleted == [[2]]
    assert bench.figures() == (1, 2, 1, 2)


def test_a_copy_that_is_in_host_memory_too_loses_only_its_file_to_make_room() -> None:
    bench = Bench(3, files=1)
    for token in (1, 2):
        bench.add(token)
    bench.write(1)
    bench.write(2)
    assert bench.tiers() == {1: "h", 2: "hd"} and not bench.gone and bench.disk.deleted == [[1]]
    assert bench.figures() == (2, 1, 2, 1)


def test_a_file_that_is_being_written_or_read_stays() -> None:
    bench = Bench(3, files=1)
    for token in (1, 2):
        bench.add(token)
    assert bench.store.write(bench.node(1)) and not bench.store.write(bench.node(2))
    assert bench.tiers() == {1: "hD", 2: "h"}
    assert bench.store.write(bench.node(1)) and bench.disk.written == [[1]], "once is enough"
    bench.store.drop_host(bench.node(1))
    assert bench.tiers()[1] == "hD", "a copy stays until it has been written"
    bench.store.written(copy_of(bench.node(1)).key, "")
    bench.store.drop_host(bench.node(1))
    assert bench.store.load(bench.node(1)) and bench.tiers()[1] == "Hd"
    assert not bench.store.write(bench.node(2)) and bench.disk.read_in == [[1]]
    assert bench.store.counters == {"disk_writes": 1, "disk_reads": 1}


def test_only_a_copy_in_host_memory_can_be_written() -> None:
    bench = Bench(1, files=9)
    assert not bench.store.write(bench.begin(1)) and not bench.disk.written


def test_a_copy_comes_back_from_its_file() -> None:
    bench = Bench(1, files=9, found=(1, 2))
    assert bench.tiers() == {1: "d", 2: "d"} and bench.figures() == (0, 2, 0, 2)
    assert copy_of(bench.node(1)).tier == "disk"
    node = bench.node(1)
    assert bench.store.load(node) and bench.store.load(node) and bench.disk.read_in == [[1]]
    assert bench.tiers() == {1: "Hd", 2: "d"} and bench.store.busy
    assert copy_of(node).tier == "host" and not copy_of(node).in_host
    assert not bench.store.load(bench.node(2)), "there is no room before the first has come"
    assert bench.store.loaded(copy_of(node).key, "") is node
    assert bench.tiers() == {1: "hd", 2: "d"} and bench.changed[-1] == [1] and copy_of(node).loans == 0
    assert bench.store.load(bench.node(2)) and bench.tiers() == {1: "d", 2: "Hd"}


def test_a_damaged_file_is_forgotten_and_its_bytes_with_it() -> None:
    bench = Bench(1, files=9, found=(1, 2))
    node = bench.node(1)
    assert bench.store.load(node)
    bench.store.loaded(copy_of(node).key, "its checksum is wrong")
    assert bench.tiers() == {2: "d"} and bench.figures() == (0, 1, 0, 1) and bench.gone == [[1]]
    assert bench.store.counters["damaged_files"] == 1 and bench.disk.deleted == [[1]]
    assert bench.store.find("", pack([1])) is None and not bench.store.busy


def test_the_newest_of_the_files_found_at_the_start_stay() -> None:
    bench = Bench(1, files=2, found=(1, 2, 3))
    assert bench.tiers() == {2: "d", 3: "d"} and bench.disk.deleted == [[1]]
    assert bench.figures() == (0, 2, 0, 2)
    none = CopyStore(TierLimits(STATE, 0, STATE), NotedDisk([StateFile("", pack([1]), FILE)]), *[lambda *_: None] * 4)
    assert not none.has_disk and not none.tree.states, "a disk without room is not used"


def test_a_file_found_at_the_start_that_is_too_large_is_deleted_alone() -> None:
    bench = Bench(1, files=2, found=())
    bench.disk.found = [StateFile("", pack([1]), FILE), StateFile("", pack([2]), 3 * FILE)]
    store = CopyStore(bench.store.limits, bench.disk, *[lambda *_: None] * 4)
    assert [unpack(tokens_to(node)) for node in store.tree.states] == [[1]] and bench.disk.deleted == [[2]]


# Writing ahead


def test_from_three_quarters_on_copies_are_written_ahead_one_at_a_time() -> None:
    bench = Bench(4, files=9)
    for token in (1, 2, 3):
        bench.add(token)
    bench.store.write_ahead()
    assert not bench.disk.written, "three quarters are not exceeded"
    bench.add(4)
    for _ in range(2):
        bench.store.write_ahead()
    assert bench.disk.written == [[1]]
    bench.store.written(copy_of(bench.node(1)).key, "")
    bench.store.write_ahead()
    assert bench.disk.written == [[1], [2]]


def test_writing_ahead_displaces_nothing() -> None:
    """Writing ahead deletes no file.

    It skips copies that are unusable, still arriving, or that failed to be written before.
    """
    bench = Bench(4, files=1)
    for token in (1, 2, 3, 4):
        bench.add(token)
    bench.write(4)
    bench.store.write_ahead()
    assert bench.disk.written == [[4]] and bench.tiers()[4] == "hd"
    full = Bench(4, files=9)
    full.add(1)
    full.write(1, error="no space left")
    full.store.lend(full.add(2))
    full.store.release(full.node(2))
    full.begin(3)
    full.add(4)
    full.store.write_ahead()
    assert full.disk.written == [[1], [4]]


def test_writing_ahead_may_fill_the_disk() -> None:
    bench = Bench(4, files=1)
    for token in (1, 2, 3, 4):
        bench.add(token)
    bench.store.write_ahead()
    assert bench.disk.written == [[1]]


def test_without_a_disk_nothing_is_written_ahead() -> None:
    bench = Bench(1)
    bench.add(1)
    bench.store.write_ahead()
    assert not bench.disk.written and bench.tiers() == {1: "h"}


# Going


def test_a_released_copy_goes_when_its_loan_ends() -> None:
    bench = Bench(2, files=9)
    bench.store.lend(bench.add(1))
    bench.store.release(bench.node(1))
    assert bench.tiers() == {1: "h"}
    bench.store.end_loan(bench.node(1))
    assert bench.tiers() == {} and bench.figures() == (0, 0, 0, 0) and not bench.store.tree.nodes
    node = bench.begin(2)
    bench.store.release(node)
    assert bench.tiers() == {2: "H"}
    bench.store.exported(copy_of(node).key)
    assert bench.tiers() == {}
    bench.add(3)
    bench.write(3)
    bench.store.release(bench.node(3))
    assert bench.tiers() == {} and bench.disk.deleted == [[3]]


def test_a_released_copy_that_is_claimed_again_stays() -> None:
    bench = Bench(1)
    bench.store.lend(bench.add(1))
    bench.store.release(bench.node(1))
    bench.store.claim(bench.node(1))
    bench.store.end_loan(bench.node(1))
    assert bench.tiers() == {1: "h"}


def test_a_released_copy_goes_when_it_has_come_or_been_written() -> None:
    bench = Bench(1, files=9, found=(1,))
    node = bench.node(1)
    assert bench.store.load(node)
    bench.store.release(node)
    assert bench.tiers() == {1: "Hd"}
    bench.store.loaded(copy_of(node).key, "")
    assert bench.tiers() == {} and bench.figures() == (0, 0, 0, 0)
    written = bench.add(2)
    assert bench.store.write(written)
    bench.store.release(written)
    assert bench.tiers() == {2: "hD"}
    bench.store.written(copy_of(written).key, "")
    assert bench.tiers() == {} and bench.figures() == (0, 0, 0, 0)


def test_files_without_a_name_are_deleted_at_the_end() -> None:
    bench = Bench(1, files=9, found=(1, 2))
    bench.node(2).sessions.add("s")
    bench.store.release_unnamed()
    assert bench.tiers() == {2: "d"} and bench.disk.deleted == [[1]]


def test_a_path_goes_with_its_last_copy() -> None:
    bench = Bench(9)
    short, long = pack([1]), pack([1, 2, 3])
    for tokens in (short, long):
        reserved = bench.store.reserve("", tokens)
        assert reserved is not None
        bench.store.exported(reserved[1])
    deeper = bench.store.match("", pack([1, 2, 3, 4]), 4)
    assert deeper is not None and deeper.end == 3
    shallower = bench.store.match("", pack([1, 2, 3, 4]), 2)
    assert shallower is not None and shallower.end == 1
    assert bench.store.find("", pack([1, 2])) is None and bench.store.find("other", short) is None
    bench.store.release(deeper)
    assert [count(node.tokens) for node in bench.store.tree.nodes] == [1]
    bench.store.release(shallower)
    assert not bench.store.tree.nodes
