"""The connections of an engine to its peers: listening, connecting and reconnecting, and one Link over each."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import anyio
import msgspec
import structlog

from baton.actors.peers import channel as channels
from baton.actors.peers.channel import Channel, ChannelError, Open
from baton.actors.peers.engines import PeerEngines
from baton.actors.peers.frames import VERSION, Frame, Hello, decode, disagreement, encode, version_of
from baton.actors.peers.link import Link, ProtocolError
from baton.actors.peers.mover import Mover, Pulled

TICK_SECONDS = 0.1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 1.0  # between two attempts to connect
MOST_STRANGERS = 16  # connections whose handshake is not complete; further ones are closed at once
TOKEN_BYTES = 16

MakeMover = Callable[[socket.socket, socket.socket, Pulled], Mover]
"""Makes a mover. Arguments: the socket on which it reads, the socket on which it serves, and its `pulled`."""


class PeerRefused(Exception):
    """The error for a peer that cannot be linked, because its version, model or layout differs."""


class QueueWire:
    """The Wire of a connection: frames wait here for the task that sends them."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    def send(self, frame: Frame) -> None:
        self.frames.put_nowait(frame)


@dataclass
class Expected:
    """A link on the listening side that still waits for its mover's two connections."""

    read: asyncio.Future[socket.socket]
    serve: asyncio.Future[socket.socket]


class PeerNode:
    """The connections of one engine: it listens for peers, and keeps a connection to each configured address."""

    def __init__(self, engines: PeerEngines, make_mover: MakeMover, key: bytes) -> None:
        self._engines, self._make_mover, self._key = engines, make_mover, key
        self._log = structlog.get_logger()
        self._expected: dict[bytes, Expected] = {}  # by the token of Hello
        self._strangers = 0  # connections whose handshake is not complete
        self._numbers = count(1)

    async def serve(self, listening: socket.socket) -> None:
        """Accept peers on a listening socket until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    try:
                        sock, _ = await loop.sock_accept(listening)
                    except OSError as error:  # Out of descriptors. Peers connect again later.
                        self._log.warning("no peer can be accepted", error=str(error))
                        await asyncio.sleep(FIRST_PAUSE_S)
                        continue
                    if self._strangers >= MOST_STRANGERS:
                        sock.close()
                    else:
                        tasks.start_soon(self._accepted, Channel(sock))
        finally:
            listening.close()

    async def keep_connected(self, address: str) -> None:
        """Keep a link to the peer at this address until cancelled."""
        pause, last_error = FIRST_PAUSE_S, ""
        while True:
            try:
                await self._connect(address)
                pause, last_error = FIRST_PAUSE_S, ""
            except (OSError, ValueError, ChannelError, PeerRefused) as error:  # ValueError: invalid host name
                if str(error) != last_error:
                    last_error = str(error)
                    self._log.warning("no link to the peer", address=address, error=last_error or type(error).__name__)
            except Exception:
                self._log.exception("a link has failed", address=address)
                pause = LONGEST_PAUSE_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    # The connecting side

    async def _connect(self, address: str) -> None:
        main = await channels.connect(address, self._key, "link")
        open_channels = [main]
        try:
            await main.send(encode(self._engines.hello))
            theirs = await self._their_hello(main)
            open_channels.append(reads := await channels.connect(address, self._key, "read", theirs.token))
            open_channels.append(serves := await channels.connect(address, self._key, "serve", theirs.token))
            del open_channels[1:]  # The mover owns these now.
            await self._run(main, theirs, reads.detach(), serves.detach())
        finally:
            for opened in open_channels:
                opened.close()

    # The listening side

    async def _accepted(self, channel: Channel) -> None:
        self._strangers += 1
        try:
            opened = await channels.accept(channel, self._key)
        except (ChannelError, TimeoutError):
            channel.close()
            return
        except Exception:
            self._log.exception("a connection from a peer has failed")
            channel.close()
            return
        finally:
            self._strangers -= 1
        if opened.purpose == "link":
            await self._linked(channel)
        else:
            self._add_to_link(opened, channel)

    def _add_to_link(self, opened: Open, channel: Channel) -> None:
        """Pass a mover's connection to the link that waits for it. Close the connection if no link does."""
        expected = self._expected.get(opened.token)
        if expected is not None:
            # The connecting side reads where this side serves.
            future = expected.serve if opened.purpose == "read" else expected.read
            if not future.done():
                future.set_result(channel.detach())
                return
        channel.close()

    async def _linked(self, main: Channel) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        expected = self._expected[token] = Expected(loop.create_future(), loop.create_future())
        try:
            await main.send(encode(msgspec.structs.replace(self._engines.hello, token=token)))
            theirs = await self._their_hello(main)
            async with asyncio.timeout(channels.HANDSHAKE_SECONDS):
                await asyncio.wait((expected.read, expected.serve))
            del self._expected[token]
            await self._run(main, theirs, expected.read.result(), expected.serve.result())
        except (ChannelError, TimeoutError, PeerRefused) as error:
            self._log.warning("a peer was refused", error=str(error) or type(error).__name__)
        except Exception:
            self._log.exception("a link has failed")
        finally:
            main.close()
            if self._expected.pop(token, None) is not None:
                for future in (expected.read, expected.serve):
                    if future.done():
                        future.result().close()

    # Both sides

    async def _their_hello(self, channel: Channel) -> Hello:
        """Receive the peer's Hello. Raises PeerRefused if the engines differ, ChannelError for another frame."""
        async with asyncio.timeout(channels.HANDSHAKE_SECONDS):
            data = await channel.receive()
        if (version := _version_of(data)) != VERSION:
            raise PeerRefused(f"version is {VERSION} here and {version} at the peer")
        frame = _decoded(data)
        if not isinstance(frame, Hello):
            raise ChannelError(f"the peer sent a {type(frame).__name__} instead of a Hello")
        if difference := disagreement(self._engines.hello, frame):
            raise PeerRefused(difference)
        return frame

    async def _run(self, main: Channel, theirs: Hello, reads: socket.socket, serves: socket.socket) -> None:
        """Run a link until its connection ends."""
        wire, loop = QueueWire(), asyncio.get_running_loop()
        name = f"{theirs.engine}#{next(self._numbers)}"
        try:
            mover = self._make_mover(reads, serves, lambda *end: link.pulled(*end))
        except BaseException:
            reads.close()
            serves.close()
            raise
        link = Link(name, theirs, wire, mover, self._engines, loop.time())
        self._engines.add(link)
        self._log.info("peer", link=name, role=theirs.role, boot=theirs.boot)
        why = "the engine ends"
        try:
            await self._carry(main, link, wire)
        except (ChannelError, ProtocolError) as error:
            why = str(error)
        except Exception:
            why = "an internal error"
            self._log.exception("a link has failed", link=name)
        finally:
            self._engines.remove(link, why)
            self._log.info("peer lost", link=name, reason=why)

    async def _carry(self, main: Channel, link: Link, wire: QueueWire) -> None:
        """Carry frames until the connection ends or the peer is silent. Raises ChannelError or ProtocolError."""
        jobs = [
            asyncio.ensure_future(job) for job in (self._receive(main, link), self._send(main, wire), self._tick(link))
        ]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _receive(self, main: Channel, link: Link) -> None:
        while True:
            frame = _decoded(await main.receive())
            link.now = asyncio.get_running_loop().time()
            link.receive(frame)

    async def _send(self, main: Channel, wire: QueueWire) -> None:
        while True:
            await main.send(encode(await wire.frames.get()))

    async def _tick(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not link.tick(loop.time(), self._engines.load()):
                raise ChannelError("the peer has been silent for two seconds")
            await asyncio.sleep(TICK_SECONDS)


def _decoded(data: bytes) -> Frame:
    try:
        return decode(data)
    except channels.UNDECODABLE as error:
        raise ChannelError(f"the peer sent bytes that are not a frame: {error}") from error


def _version_of(data: bytes) -> int:
    try:
        return version_of(data)
    except channels.UNDECODABLE as error:
        raise ChannelError(f"the peer sent bytes that are not a Hello: {error}") from error
