"""Listening for clients: an address or a Unix socket, with or without TLS."""

import asyncio
import errno
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.api.config import Config, ConfigError

BACKLOG = 1024  # maximum connections that wait in the kernel to be accepted
HANDSHAKE_S = 10.0  # time for a client's TLS handshake; its connection counts only after the handshake


@dataclass(frozen=True)
class Listening:
    """A place where connections are accepted."""

    server: asyncio.Server
    url: str  # URL for the log; "unix:PATH" for a Unix socket
    path: Path | None = None  # path of the Unix socket; None for an address
    file: tuple[int, int] | None = None  # device and inode of the socket's file

    def close(self) -> None:
        """Accept no more connections. Existing ones stay open."""
        self.server.close()
        # Do not unlink the path if another server listens there now.
        if self.path is not None and self.file == file_at(self.path):
            self.path.unlink(missing_ok=True)


async def listen(config: Config, make: Callable[[], asyncio.BaseProtocol]) -> Listening:
    """Accept connections at the address or Unix socket of the options. Raises OSError and ConfigError.

    make: makes the protocol of a connection
    """
    loop, context = asyncio.get_running_loop(), tls_context(config)
    options: dict[str, Any] = {"ssl": context, "backlog": BACKLOG}
    if context is not None:
        options["ssl_handshake_timeout"] = HANDSHAKE_S
    if config.uds is not None:
        refuse_in_use(config.uds)
        server = await loop.create_unix_server(make, config.uds, **options)
        return Listening(server, f"unix:{config.uds}", Path(config.uds), file_at(Path(config.uds)))
    if is_every_address(config.host) and socket.has_dualstack_ipv6():
        # `loop.create_server` would restrict a socket that it makes for an IPv6 address to IPv6.
        both = socket.create_server((config.host, config.port), family=socket.AF_INET6, dualstack_ipv6=True)
        server = await loop.create_server(make, sock=both, **options)
    else:
        try:
            server = await loop.create_server(make, config.host, config.port, **options)
        except UnicodeError:
            raise ConfigError(f"--host: {config.host!r} is not the name of a host") from None
    host, port, *_ = server.sockets[0].getsockname()
    shown = f"[{host}]" if ":" in host else host
    return Listening(server, f"http{'s' if context is not None else ''}://{shown}:{port}")


def refuse_in_use(path: str) -> None:
    """Raise OSError if a server listens on a Unix socket: listening there again would replace it."""
    with socket.socket(socket.AF_UNIX) as client, suppress(FileNotFoundError, ConnectionRefusedError):
        client.connect(path)
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def file_at(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file at a path; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def place_of(config: Config) -> str:
    """Return the address or the socket's path that the options set for clients."""
    return config.uds if config.uds is not None else f"{config.host}:{config.port}"


def tls_context(config: Config) -> ssl.SSLContext | None:
    """Return the context of --tls-cert and --tls-key; None without them. Raises ConfigError."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert, --tls-key: {error}") from None
    return context


def is_every_address(host: str) -> bool:
    """Return whether `host` is IPv6's address for all interfaces, in any spelling."""
    try:
        return ipaddress.IPv6Address(host).is_unspecified
    except ValueError:
        return False
