"""A TCP proxy on loopback that can fall silent: connections stay open, and no byte arrives any more."""

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

CHUNK = 1 << 14


class SilentProxy:
    """Forwards connections to a port of loopback until it is silenced.

    A network that loses every packet looks like this from both ends: neither notices that a connection is dead.
    """

    def __init__(self, target: int) -> None:
        """target: the port that connections are forwarded to."""
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._forwards, self._sockets = threading.Event(), list[socket.socket]()
        self._forwards.set()
        self._left: int | None = None  # bytes that are forwarded before the proxy falls silent; None: all
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._closed = True
        self._forwards.set()
        for each in (self._listening, *self._sockets):
            _end(each)

    def silence(self, after: int = 0) -> None:
        """Forward `after` more bytes, counted over all connections, and then no more."""
        with self._lock:
            self._left = after
        if not after:
            self._forwards.clear()

    def heal(self) -> None:
        """Forward again, also the bytes that were held back."""
        with self._lock:
            self._left = None
        self._forwards.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except ConnectionRefusedError:
                    _end(client)
                    continue
                self._sockets += (client, server)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                self._forwards.wait()
                if self._closed:
                    return
                sink.sendall(data)
                self._count(len(data))
        self._forwards.wait()  # The end of a connection does not arrive either.
        _end(source)
        _end(sink)

    def _count(self, sent: int) -> None:
        with self._lock:
            if self._left is not None and self._left > 0:
                self._left = max(0, self._left - sent)
                if not self._left:
                    self._forwards.clear()


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
