"""Connections to peers: the key, failures while a link is made, and failures of a link."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.actors.peers import channel as channels
from baton.actors.peers.channel import Channel, ChannelError, listen
from baton.actors.peers.engines import PeerEngines
from baton.actors.peers.frames import VERSION, Beat, Compute, Hello, encode
from baton.actors.peers.link import Link
from baton.actors.peers.node import PeerNode

KEY = b"a key of more than sixteen bytes"


class NoComputing:
    def begin(self, loan: int, frame: Compute, link: str) -> str:
        return "this engine computes nothing"

    def stop(self, loan: int) -> None:
        raise AssertionError("nothing was begun")


class NoMover:
    """A mover of links over which nothing is read."""

    def __init__(self, reads: socket.socket, serves: socket.socket) -> None:
        self._sockets = reads, serves

    def close(self, fenced: Callable[[], None]) -> None:
        for sock in self._sockets:
            sock.close()
        fenced()


def node(name: str, key: bytes = KEY) -> tuple[PeerEngines, PeerNode]:
    hello = Hello(VERSION, name, f"boot of {name}", "both", "model", "float32", "float32", "none", 16, 100, 10, "none")
    engines = PeerEngines(hello, {}, NoComputing(), Beat)  # type: ignore[arg-type]
    return engines, PeerNode(engines, lambda reads, serves, pulled: NoMover(reads, serves), key)  # type: ignore[arg-type]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (links have no event to wait for)
            await asyncio.sleep(0.01)


def linked(tmp_path: Path, scenario: Callable[[PeerEngines, PeerEngines], Awaitable[None]], key: bytes = KEY) -> None:
    """Run a scenario with a node that listens, and one that connects to it with this key."""

    async def run() -> None:
        address = f"unix:{tmp_path}/link"
        (one, listens), (other, connects) = node("one"), node("other", key)
        tasks = [
            asyncio.ensure_future(listens.serve(listen(address))),
            asyncio.ensure_future(connects.keep_connected(address)),
        ]
        try:
            await scenario(one, other)
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_engines_with_the_same_key_are_linked(tmp_path: Path) -> None:
    async def scenario(one: PeerEngines, other: PeerEngines) -> None:
        await until(lambda: one.links and other.links)
        assert [link.peer.engine for link in one.links.values()] == ["other"]

    linked(tmp_path, scenario)


def test_engines_with_different_keys_are_not(tmp_path: Path) -> None:
    async def scenario(one: PeerEngines, other: PeerEngines) -> None:
        await asyncio.sleep(0.3)
        assert not one.links and not other.links
        with pytest.raises(ChannelError):
            await channels.connect(f"unix:{tmp_path}/link", b"another key of many bytes", "link")
        (await channels.connect(f"unix:{tmp_path}/link", KEY, "link")).close()

    linked(tmp_path, scenario, b"another key of many bytes")


def test_pauses_between_attempts_grow_and_begin_again_after_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, attempts = list[float](), iter([False, False, False, False, True, False, False])

    async def connect(self: PeerNode, address: str) -> None:
        if not next(attempts):
            raise ConnectionRefusedError

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 7:
            raise asyncio.CancelledError

    monkeypatch.setattr(PeerNode, "_connect", connect)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(node("one")[1].keep_connected("unix:none"))
    assert pauses == [0.25, 0.5, 1.0, 1.0, 0.25, 0.5, 1.0]


def test_an_internal_error_ends_a_link_and_a_new_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True])
    receive = Link.receive

    def receive_or_fail(self: Link, frame: Any) -> None:
        if next(failures, False):
            raise KeyError("injected")
        receive(self, frame)

    monkeypatch.setattr(Link, "receive", receive_or_fail)

    async def scenario(one: PeerEngines, other: PeerEngines) -> None:
        await until(lambda: one.links and other.links)
        first = {*one.links, *other.links}
        await until(lambda: one.links and other.links and first.isdisjoint(one.links))

    linked(tmp_path, scenario)


NO_TEXT = b"\x95\xa4Open\xa4li\xffk\xc4\x00\xc4\x10" + b"x" * 16 + b"\xc4\x01p"
NO_TAG = b"\x92\xa9Challeng\xff\xc4\x10" + b"x" * 16
NO_HELLO = msgspec.msgpack.encode(["Hello", VERSION, *["x"] * 12]).replace(b"\xa1x", b"\xa1\xff")
NESTED = b"\x91" * 100_000
NONSENSE = pytest.mark.parametrize(
    "nonsense",
    [NO_TEXT, NO_TAG, NO_HELLO, NESTED, NESTED[:500], b"\xc1", b""],
    ids=["no text", "no tag", "no hello", "nested", "less nested", "no code", "nothing"],
)


async def until_closed(reader: asyncio.StreamReader) -> None:
    """Read until the other side closes the connection."""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(10):
            while await reader.read(1000):
                pass


@NONSENSE
def test_a_stranger_that_sends_nonsense_is_turned_away(tmp_path: Path, nonsense: bytes) -> None:
    async def scenario(one: PeerEngines, other: PeerEngines) -> None:
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/link")
        writer.write(len(nonsense).to_bytes(4, "big") + nonsense)
        await until_closed(reader)
        writer.close()
        await until(lambda: one.links and other.links)

    linked(tmp_path, scenario)


@NONSENSE
def test_a_peer_that_answers_with_nonsense_is_tried_again(tmp_path: Path, nonsense: bytes) -> None:
    async def run() -> None:
        calls = list[int]()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            calls.append(1)
            writer.write(len(nonsense).to_bytes(4, "big") + nonsense)
            await until_closed(reader)
            writer.close()

        async with await asyncio.start_unix_server(answer, f"{tmp_path}/link"):
            connecting = asyncio.ensure_future(node("other")[1].keep_connected(f"unix:{tmp_path}/link"))
            await until(lambda: len(calls) > 1 or connecting.done())
            assert not connecting.done()
            connecting.cancel()

    asyncio.run(run())


def test_a_mover_that_cannot_be_made_ends_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, failed = NoMover.__init__, list[int]()

    def make(self: NoMover, *sockets: socket.socket) -> None:
        if len(failed) < 2:  # on each side
            failed.append(1)
            raise RuntimeError("can't start new thread")
        original(self, *sockets)

    async def scenario(one: PeerEngines, other: PeerEngines) -> None:
        await until(lambda: one.links and other.links)

    monkeypatch.setattr(NoMover, "__init__", make)
    linked(tmp_path, scenario)


@NONSENSE
def test_a_hello_that_is_nonsense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonsense: bytes) -> None:
    """A peer that knows the key can end its own link only."""
    original = Channel.send
    sent = list[int]()

    async def send(self: Channel, data: bytes) -> None:
        is_hello = b"boot of other" in data and not sent
        sent.extend([1] * is_hello)
        await original(self, nonsense if is_hello else data)

    async def scenario(one: PeerEngines, other: PeerEngines) -> None:
        await until(lambda: sent and one.links and other.links)

    monkeypatch.setattr(Channel, "send", send)
    linked(tmp_path, scenario)


def test_exhausted_descriptors_delay_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError(errno.EMFILE, "injected")] * 2)
    loop_class = asyncio.SelectorEventLoop
    accept = loop_class.sock_accept

    async def accept_or_fail(self: Any, sock: socket.socket) -> Any:
        if (failure := next(failures, None)) is not None:
            raise failure
        return await accept(self, sock)

    monkeypatch.setattr(loop_class, "sock_accept", accept_or_fail)

    async def scenario(one: PeerEngines, other: PeerEngines) -> None:
        await until(lambda: one.links and other.links)
        assert next(failures, None) is None

    linked(tmp_path, scenario)


def test_a_peer_that_opens_half_of_its_connections_holds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_SECONDS", 0.3)

    async def run() -> None:
        address = f"unix:{tmp_path}/link"
        engines, listens = node("one")
        task = asyncio.ensure_future(listens.serve(listen(address)))
        main = await channels.connect(address, KEY, "link")
        await main.send(encode(engines.hello))
        theirs = msgspec.msgpack.decode(await main.receive(), type=Hello)
        half = await channels.connect(address, KEY, "read", theirs.token)
        for each in (main, half):
            with pytest.raises(ChannelError):
                await asyncio.wait_for(each.receive(), 5)
            each.close()
        assert not engines.links and not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("hello", [["Hello", 1, "old", "boot"], ["Hello", VERSION + 1, *range(20)]])
@pytest.mark.parametrize("listens", [False, True])
def test_a_peer_of_another_version_is_refused_by_its_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hello: list[object], listens: bool
) -> None:
    """Its Hello may have fewer or more fields. Either side may be the older one."""

    async def run() -> None:
        address = f"unix:{tmp_path}/link"
        engines, ours = node("ours")
        if listens:
            task = asyncio.ensure_future(ours.serve(listen(address)))
            main = await channels.connect(address, KEY, "link")
        else:
            sock = listen(address)
            task = asyncio.ensure_future(ours.keep_connected(address))
            main = channels.Channel((await asyncio.get_running_loop().sock_accept(sock))[0])
            await channels.accept(main, KEY)
        await main.send(msgspec.msgpack.encode(hello))
        await until(lambda: f"version is {VERSION} here and {hello[1]} at the peer" in output())
        main.close()
        assert not engines.links
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not listens:
            sock.close()

    shown: list[str] = []

    def output() -> str:
        shown.append(capsys.readouterr().out)
        return "".join(shown)

    asyncio.run(run())
