"""The server's mover: for each link one thread that reads copies from the peer, and one that serves copies to it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from baton.actors.peers.mover import Landing, Pulled
from baton.actors.storage.host_memory import HostState, HostStates

TICKET_BYTES = 8
COPY_TIMEOUT_S = 60.0  # how long the source waits for a copy that its device is still making
HERE, GONE = b"\1", b"\0"


class Carrier(Protocol):
    """The transfer of a copy's bytes from the source's process to the sink's."""

    def answer(self, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return the bytes that the source sends to the sink for a copy. Called on the thread that serves.

        Raises LookupError if the sink cannot read the copy.
        """
        ...

    def receive(self, sock: socket.socket, parts: Sequence[memoryview]) -> None:
        """Receive the source's answer, and fill `parts` with the copy. Called on the thread that reads.

        Raises OSError or EOFError if that fails.
        """

    def close(self) -> None:
        """End every transfer, so that no part is written any more. The last call, on the thread that reads."""


class ThreadedMover:
    """A Mover with two threads: one reads copies from the peer, the other serves copies to the peer.

    A request is a ticket. The answer is the byte HERE and the carrier's answer, or the byte GONE.
    """

    def __init__(
        self, carrier: Carrier, host: HostStates, reads: socket.socket, serves: socket.socket, pulled: Pulled
    ) -> None:
        """reads, serves: connected sockets in blocking mode. pulled: called on the event loop."""
        self._carrier, self._host, self._reads, self._serves, self._pulled = carrier, host, reads, serves, pulled
        self._loop = asyncio.get_running_loop()
        self._lent: dict[int, tuple[int, int]] = {}  # key and first page, by ticket
        self._pulls: SimpleQueue[tuple[int, int, int] | None] = SimpleQueue()
        self._closed = False
        self._reader = threading.Thread(target=self._read_all, name="peer reads", daemon=True)
        self._server = threading.Thread(target=self._serve_all, name="peer serves", daemon=True)
        self._reader.start()
        self._server.start()

    def lend(self, ticket: int, key: int, first_page: int) -> bytes:
        self._lent[ticket] = key, first_page
        return b""

    def withdraw(self, ticket: int) -> None:
        self._lent.pop(ticket, None)

    def pull(self, ticket: int, where: bytes, position: int, first_page: int) -> None:
        self._pulls.put((ticket, position, first_page))

    def close(self, fenced: Callable[[], None]) -> None:
        """End both threads. `fenced` is called when the reading one has ended: only that one writes to host memory."""
        self._closed = True
        self._lent.clear()
        for sock in (self._reads, self._serves):
            with contextlib.suppress(OSError):  # The peer may have closed it already.
                sock.shutdown(socket.SHUT_RDWR)
        self._pulls.put(None)
        threading.Thread(target=self._join, args=(fenced,), name="peer fence", daemon=True).start()

    def _join(self, fenced: Callable[[], None]) -> None:
        self._reader.join()
        self._reads.close()
        self._post(fenced)
        self._server.join()
        self._serves.close()

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop. Do nothing if the loop is closed, because the process is ending then."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    # On the thread that reads

    def _read_all(self) -> None:
        while (pull := self._pulls.get()) is not None and not self._closed:
            ticket, position, first_page = pull
            try:
                (landing, seconds), error = self._read(ticket, position, first_page), ""
            except (OSError, EOFError, RuntimeError) as failure:
                landing, seconds, error = None, 0.0, str(failure) or type(failure).__name__
            self._post(self._report, ticket, landing, error, seconds)
            del landing  # A copy's host memory is free when its last reference is gone: keep none while waiting.
        self._carrier.close()

    def _report(self, ticket: int, landing: Landing | None, error: str, seconds: float) -> None:
        if not self._closed:
            self._pulled(ticket, landing, error, seconds)

    def _read(self, ticket: int, position: int, first_page: int) -> tuple[HostState, float]:
        """Return a copy, and the seconds that its bytes took to arrive, not counting the wait until the peer answers.

        Raises EOFError if the peer does not have the copy or closes the connection, RuntimeError if memory is short.
        """
        landing = self._host.room(position, first_page)
        self._reads.sendall(ticket.to_bytes(TICKET_BYTES, "big"))
        answer = bytearray(1)
        read_exactly(self._reads, memoryview(answer))
        if bytes(answer) != HERE:
            raise EOFError("the peer has no such copy")
        began = time.perf_counter()
        self._carrier.receive(self._reads, [bytes_of(part) for part in (*landing.state, *landing.blocks)])
        return landing, time.perf_counter() - began

    # On the thread that serves

    def _serve_all(self) -> None:
        ticket = bytearray(TICKET_BYTES)
        try:
            while not self._closed:
                read_exactly(self._serves, memoryview(ticket))
                for piece in self._answer(int.from_bytes(ticket, "big")):
                    self._serves.sendall(piece)
        except (OSError, EOFError):
            return  # The connection has ended. The link notices that on its own connection.

    def _answer(self, ticket: int) -> Sequence[memoryview | bytes]:
        """Return the answer to a peer that asks for the copy of this ticket."""
        entry = self._lent.get(ticket)
        copy = self._host.wait_for(entry[0], COPY_TIMEOUT_S) if entry is not None else None
        if entry is None or copy is None or copy.first_page > entry[1]:
            return [GONE]
        try:
            return [HERE, *self._carrier.answer(parts_of(copy, entry[1]))]
        except LookupError:
            return [GONE]


def parts_of(copy: HostState, first_page: int) -> list[memoryview]:
    """Return the memory of a copy's state and of its KV from `first_page` on."""
    parts = [bytes_of(part) for part in copy.state]
    absent = first_page - copy.first_page  # leading pages of the copy that the peer does not need
    for part in copy.blocks:
        if absent < len(part):
            parts.append(bytes_of(part[absent:]))
        absent = max(absent - len(part), 0)
    return parts


def bytes_of(part: Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 tensor, without a copy."""
    return memoryview(part.view(-1).numpy()).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack the protocol


def read_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from a socket. Raises EOFError if the connection ends first."""
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:], 0, socket.MSG_WAITALL)  # one call for all bytes acquires the GIL once
        if not got:
            raise EOFError("the peer has closed the connection")
        at += got
