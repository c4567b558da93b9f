"""A flush reaches every tier, and copies in progress during a flush do not affect copies made after it."""

import asyncio
from pathlib import Path

from baton.actors.actor import Address
from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.limits import TierLimits
from baton.actors.messages import Drop, Message
from baton.actors.storage.disk import StateFile
from baton.actors.tokens import Tokens, pack
from baton.models.hash_definition import expected_output
from tests.actors.ring import running
from tests.actors.test_failures import VOCABULARY, hash_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class NotedDisk:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def files(self) -> list[StateFile]:
        return []

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        self.calls.append(f"write {key}")

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        self.calls.append(f"read {key}")

    def delete(self, salt: str, tokens: Tokens) -> None:
        self.calls.append("delete")

    def clear(self, ticket: int) -> None:
        self.calls.append("clear")


class Bench:
    def __init__(self) -> None:
        self.disk = NotedDisk()
        self.dropped: list[int] = []
        limits = TierLimits(host_bytes=10_000, disk_bytes=1_000_000, state_bytes=100)
        self.store = CopyStore(limits, self.disk, self._sent, lambda node: None, lambda node: None, lambda node: None)

    def _sent(self, to: Address, message: Message) -> None:
        assert isinstance(message, Drop)
        self.dropped += message.keys

    def reserve(self) -> int:
        reserved = self.store.reserve("", pack(PROMPT))
        assert reserved is not None
        return reserved[1]

    def found(self) -> bool:
        return self.store.match("", pack(PROMPT), 100) is not None

    def bytes(self) -> tuple[int, int]:
        return self.store.host_bytes, self.store.disk_bytes


def written() -> tuple[Bench, int]:
    """Return a store in which a copy is being written to its file, and the key of that copy."""
    bench = Bench()
    key = bench.reserve()
    bench.store.exported(key)
    assert bench.store.write(bench.store.tree.deepest("", pack(PROMPT), 100))
    return bench, key


def test_a_file_being_written_at_a_flush_is_deleted_and_one_written_after_it_stays() -> None:
    bench, old = written()
    bench.store.flush()
    assert not bench.found()
    new = bench.reserve()
    bench.store.exported(new)
    assert bench.store.write(bench.store.tree.deepest("", pack(PROMPT), 100))
    assert bench.disk.calls == [f"write {old}", "delete", f"write {new}"]
    bench.store.written(old, "")
    bench.store.written(new, "")
    assert bench.disk.calls == [f"write {old}", "delete", f"write {new}"]
    assert bench.dropped == [old]
    copy = bench.store.tree.deepest("", pack(PROMPT), 100).state
    assert copy.in_file and copy.in_host and bench.bytes() == (copy.size, copy.file_size)


def test_a_copy_under_way_at_a_flush_goes_when_it_is_made() -> None:
    bench = Bench()
    key = bench.reserve()
    bench.store.flush()
    assert not bench.found() and bench.store.leaving and bench.dropped == []
    bench.store.exported(key)
    assert bench.dropped == [key] and not bench.store.leaving and bench.bytes() == (0, 0)


def test_a_lent_copy_goes_when_the_loan_ends() -> None:
    bench, key = written()
    bench.store.written(key, "")
    node = bench.store.tree.deepest("", pack(PROMPT), 100)
    bench.store.lend(node)
    bench.store.flush()
    assert bench.disk.calls == [f"write {key}", "delete"] and bench.dropped == []
    bench.store.end_loan(node)
    assert bench.dropped == [key] and bench.bytes() == (0, 0)


def test_a_read_under_way_at_a_flush_leaves_nothing_whether_it_fails_or_not() -> None:
    for error in ("", "damaged"):
        bench, key = written()
        bench.store.written(key, "")
        node = bench.store.tree.deepest("", pack(PROMPT), 100)
        bench.store.drop_host(node)
        assert bench.store.load(node)
        bench.store.flush()
        bench.store.loaded(node.state.key, error)
        assert bench.bytes() == (0, 0) and not bench.store.leaving and not bench.store.busy


def test_a_copy_that_could_not_be_made_is_not_used() -> None:
    bench, key = written()
    bench.store.unmade(key)
    assert not bench.found() and bench.store.reserve("", pack(PROMPT)) is None
    bench.store.written(key, "the copy could not be made")
    assert bench.bytes() == (0, 0) and bench.dropped == []
    bench.reserve()


def test_nothing_is_matched_after_a_flush_in_a_ring_with_files(tmp_path: Path) -> None:
    model, files = hash_model(), lambda: list(tmp_path.glob("*.safetensors"))
    tiers = TierLimits(1 << 20, 1 << 20, state_bytes=64, token_bytes=8)

    async def scenario() -> None:
        async with running(model, slots=4, pages=20, page_size=4, max_running=2, tiers=tiers, folder=tmp_path) as ring:
            ring.name("s", [])
            turn = await ring.turn("s", PROMPT, 4)
            assert (await ring.suspend("s")).tier == "disk"
            assert files()
            await ring.flush()
            assert not files()
            history = PROMPT + turn.tokens
            after = await ring.turn("s", [*history, 7], 4)
            assert (after.cached, after.matched, after.origin) == (0, 0, "tokens")
            assert after.tokens == expected_output([*history, 7], 4, VOCABULARY)

    asyncio.run(scenario())
