"""The carrier over NIXL, NVIDIA's library for transfers between processes: RDMA, shared memory or TCP through UCX.

The sink reads the source's memory. Only memory that an agent has registered can be read, so only copies that lie in
the arena are carried. Each link has an agent of its own: destroying it is the only fence that NIXL has, because an
abandoned transfer goes on writing.
"""

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from baton.actors.peers.threads import read_exactly
from baton.actors.storage.arena import Arena

SIZE_BYTES = 4
MOST_ANSWER = 1 << 24  # maximum bytes of a source's answer
PROGRESS_US = 1000  # pause of the agent's own thread; without one it takes a whole core
FIRST_POLL_S, LONGEST_POLL_S = 20e-6, 1e-3
Place = tuple[int, int]  # address, and size in bytes


class Places(Struct, array_like=True):
    """source → sink: where the parts of a copy are in the source's memory."""

    agent: bytes  # the source's agent, as NIXL's metadata describes it
    parts: list[Place]


class NixlError(OSError):
    """The error of a transfer that NIXL could not complete."""


def load_nixl() -> Any:
    """Import the binding. Raises ImportError that names the extra."""
    for package in ("nixl_cu12", "nixl_cu13"):
        try:
            return import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
    raise ImportError("NIXL is not installed: pip install 'baton-serve[peers]'")


class NixlCarrier:
    """A Carrier with a NIXL agent. The agent is made on first use, because that takes up to seconds."""

    def __init__(self, binding: Any, arena: Arena) -> None:
        """binding: from `load_nixl`. arena: the memory of all copies of this engine."""
        self._nixl, self._arena = binding, arena
        self._opening = threading.Lock()
        self._agent: Any = None
        self._closed = False
        self._described = b""  # NIXL's metadata of the agent, with which the peer reaches it
        self._peers: dict[bytes, str] = {}  # names of the peer's agents, by their metadata

    # On the thread that serves

    def answer(self, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        places = [place_of(part) for part in parts]
        if not all(self._arena.contains(*place) for place in places):
            raise LookupError("a part of the copy is outside the arena")
        self._open()
        data = msgspec.msgpack.encode(Places(self._described, places))
        return [memoryview(len(data).to_bytes(SIZE_BYTES, "big") + data)]

    # On the thread that reads

    def receive(self, sock: socket.socket, parts: Sequence[memoryview]) -> None:
        found = _receive_places(sock)
        here = [place_of(part) for part in parts]
        if sum(size for _, size in here) != sum(size for _, size in found.parts):
            raise NixlError("the peer's copy has another size")
        if not all(self._arena.contains(*place) for place in here):
            raise NixlError("the arena has no room for the copy")
        self._open()
        try:
            self._read(sock, paired(here, found.parts), found.agent)
        except BaseException:
            self._fence()  # before the caller frees the memory of `parts`
            raise

    def close(self) -> None:
        self._closed = True
        self._fence()

    def _read(self, sock: socket.socket, pairs: list[tuple[Place, Place]], peer: bytes) -> None:
        """Read the second place of each pair into the first. Raises NixlError, or EOFError if the socket is shut down.

        After an error the transfer may still be writing.
        """
        nixl, pause = self._nixl, FIRST_POLL_S
        ours, theirs = (
            nixl.nixlXferDList(nixl.DRAM_SEG, [(*place, 0) for place in places]) for places in zip(*pairs, strict=True)
        )
        try:
            if peer not in self._peers:
                self._peers[peer] = self._agent.loadRemoteMD(peer)
            request = self._agent.createXferReq(nixl.NIXL_READ, ours, theirs, self._peers[peer])
            status = self._agent.postXferReq(request)
            while status == nixl.NIXL_IN_PROG:
                if _is_shut_down(sock):
                    raise EOFError("the link has ended")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
                status = self._agent.getXferStatus(request)
            self._agent.releaseXferReq(request)
        except EOFError:
            raise
        except Exception as error:
            raise NixlError(f"NIXL: {error}") from error
        if status != nixl.NIXL_SUCCESS:
            raise NixlError(f"NIXL: the transfer ended with {status}")

    # The agent

    def _open(self) -> None:
        """Make the agent if there is none. Raises NixlError."""
        with self._opening:
            if self._agent is not None:
                return
            if self._closed:
                raise NixlError("the link has ended")
            nixl, name = self._nixl, secrets.token_hex(8)
            config = nixl.nixlAgentConfig()
            config.useProgThread, config.pthrDelay = True, PROGRESS_US
            try:
                agent = nixl.nixlAgent(name, config)
                agent.createBackend("UCX", agent.getPluginParams("UCX")[0])
                places = [(*place, 0, "") for place in self._arena.places]
                agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, places))
                self._agent, self._described = agent, agent.getLocalMD()
            except Exception as error:
                raise NixlError(f"NIXL: {error}") from error

    def _fence(self) -> None:
        """Destroy the agent: after that none of its transfers writes any more.

        An agent ends with the last reference to it. So no other name than `_agent` may be bound to it: the traceback of
        an error would keep it.
        """
        with self._opening:
            self._agent = None
            self._peers.clear()


def place_of(part: memoryview) -> Place:
    return np.frombuffer(part, np.uint8).ctypes.data, len(part)


def paired(ours: Sequence[Place], theirs: Sequence[Place]) -> list[tuple[Place, Place]]:
    """Cut two lists of places with the same sum of bytes into pairs of places of the same size, in order."""
    pairs, remaining = list[tuple[Place, Place]](), list(reversed(theirs))
    for address, size in ours:
        while size:
            there, available = remaining.pop()
            part = min(size, available)
            pairs.append(((address, part), (there, part)))
            address, size = address + part, size - part
            if available > part:
                remaining.append((there + part, available - part))
    return pairs


def _receive_places(sock: socket.socket) -> Places:
    """Receive a source's answer. Raises NixlError if it cannot be decoded."""
    size = bytearray(SIZE_BYTES)
    read_exactly(sock, memoryview(size))
    if (length := int.from_bytes(size, "big")) > MOST_ANSWER:
        raise NixlError(f"an answer of {length} bytes, where {MOST_ANSWER} are allowed")
    data = bytearray(length)
    read_exactly(sock, memoryview(data))
    try:
        return msgspec.msgpack.decode(data, type=Places)
    except msgspec.DecodeError as error:
        raise NixlError(f"no answer of a source: {error}") from error


def _is_shut_down(sock: socket.socket) -> bool:
    """Return whether a socket, on which the peer sends nothing now, was shut down or closed by either side."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
