"""A connection to a peer: length-prefixed frames over TCP or a Unix socket, and the proof that both know the key.

The listening side proves nothing before the connecting side has: a stranger learns 16 random bytes. The proofs are
HMAC-SHA-256 over both sides' random bytes, so that neither can be replayed. Nothing is encrypted.
"""

import asyncio
import hmac
import secrets
import socket
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")
HEADER_BYTES = 4
STRANGERS_FRAME = 512  # most bytes of a frame before the peer has proved that it knows the key
PEERS_FRAME = 1 << 26  # most bytes of a frame afterwards: prompts of 16 million tokens
HANDSHAKE_SECONDS = 2.0
NONCE_BYTES = 16
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # errors of msgspec for wrong bytes
Purpose: TypeAlias = Literal["link", "read", "serve"]
"""The use of a connection. link: frames. read, serve: the mover's bytes, to or from the connecting side."""


class ChannelError(Exception):
    """The error of a connection that has ended, or whose peer violates the protocol."""


class Challenge(Struct, tag=True, array_like=True):
    """listening side → connecting side: random bytes."""

    nonce: bytes


class Open(Struct, tag=True, array_like=True):
    """connecting side → listening side: the use of the connection, and the proof."""

    purpose: Purpose
    token: bytes  # the token of the link that a mover's connection belongs to
    nonce: bytes
    proof: bytes


class Welcome(Struct, tag=True, array_like=True):
    """listening side → connecting side: the proof of the listening side."""

    proof: bytes


class Channel:
    """A connected socket that carries frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock

    async def send(self, data: bytes) -> None:
        """Send one frame. Raises ChannelError if the connection has ended."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.socket, len(data).to_bytes(HEADER_BYTES, "big") + data)
        except OSError as error:
            raise ChannelError(f"the connection has ended: {error}") from error

    async def receive(self, limit: int = PEERS_FRAME) -> bytes:
        """Receive one frame of at most `limit` bytes. Raises ChannelError if it is longer, or cut off."""
        size = int.from_bytes(await self._exactly(HEADER_BYTES), "big")
        if size > limit:
            raise ChannelError(f"the peer sent a frame of {size} bytes; at most {limit} are allowed")
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        """Receive exactly `size` bytes, and none of what follows: a mover takes over the socket from there."""
        data = bytearray(size)
        view, at, loop = memoryview(data), 0, asyncio.get_running_loop()
        while at < size:
            try:
                got = await loop.sock_recv_into(self.socket, view[at:])
            except OSError as error:
                raise ChannelError(f"the connection has ended: {error}") from error
            if not got:
                raise ChannelError("the peer has closed the connection")
            at += got
        return bytes(data)

    def detach(self) -> socket.socket:
        """Return the socket in blocking mode, for a mover's thread. The channel must not be used any more."""
        self.socket.setblocking(True)
        return self.socket

    def close(self) -> None:
        self.socket.close()


async def accept(channel: Channel, key: bytes) -> Open:
    """Carry out the listening side's part of the handshake. Raises ChannelError if the peer does not know the key."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        ours = secrets.token_bytes(NONCE_BYTES)
        await channel.send(msgspec.msgpack.encode(Challenge(ours)))
        opened = _decoded(await channel.receive(STRANGERS_FRAME), Open)
        right = _proof(key, "connect", opened.purpose, opened.token, ours, opened.nonce)
        if len(opened.nonce) != NONCE_BYTES or not hmac.compare_digest(right, opened.proof):
            raise ChannelError("the peer does not know the key")
        proof = _proof(key, "accept", opened.purpose, opened.token, opened.nonce, ours)
        await channel.send(msgspec.msgpack.encode(Welcome(proof)))
        return opened


async def connect(address: str, key: bytes, purpose: Purpose, token: bytes = b"") -> Channel:
    """Connect to HOST:PORT or unix:PATH, and carry out the connecting side's part of the handshake.

    Raises OSError or ChannelError.
    """
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        channel = Channel(await _connected(address))
        try:
            theirs = _decoded(await channel.receive(STRANGERS_FRAME), Challenge).nonce
            ours = secrets.token_bytes(NONCE_BYTES)
            opened = Open(purpose, token, ours, _proof(key, "connect", purpose, token, theirs, ours))
            await channel.send(msgspec.msgpack.encode(opened))
            welcome = _decoded(await channel.receive(STRANGERS_FRAME), Welcome)
            if not hmac.compare_digest(_proof(key, "accept", purpose, token, ours, theirs), welcome.proof):
                raise ChannelError("the peer does not know the key")
        except BaseException:
            channel.close()
            raise
        return channel


def listen(address: str) -> socket.socket:
    """Return a listening socket for HOST:PORT or unix:PATH. Raises OSError, or ValueError if the address is neither."""
    family, where = parsed(address)
    if isinstance(where, str):
        _remove_stale(where)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(16)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    """Remove the socket file of a process that was killed: nothing listens on it any more."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except OSError:
            return  # The file does not exist, or is not a socket: `bind` succeeds or raises the error.


def parsed(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return the family and address of HOST:PORT, [IPV6]:PORT or unix:PATH. Raises ValueError for anything else."""
    if address.startswith("unix:") and len(address) > len("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError(f"{address!r} is neither HOST:PORT nor unix:PATH")
    if host.startswith("["):
        return socket.AF_INET6, (host.strip("[]"), int(port))
    return socket.AF_INET, (host, int(port))


async def _connected(address: str) -> socket.socket:
    family, where = parsed(address)
    loop = asyncio.get_running_loop()
    if not isinstance(where, str):
        found = await loop.getaddrinfo(*where, family=family, type=socket.SOCK_STREAM)
        where = str(found[0][4][0]), where[1]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise ChannelError(f"the peer sent bytes that are not a {kind.__name__}: {error}") from error


def _proof(key: bytes, side: str, purpose: str, token: bytes, theirs: bytes, ours: bytes) -> bytes:
    return hmac.digest(key, msgspec.msgpack.encode((side, purpose, token, theirs, ours)), "sha256")
