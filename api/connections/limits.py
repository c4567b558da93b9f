"""The limits of client connections, from the server's options and the process's limit on open files."""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace

from baton.api.config import Config

if sys.platform != "win32":
    import resource

OTHER_DESCRIPTORS = 256  # file descriptors reserved for everything but connections
REFUSALS = 64
UNLIMITED = 2**20  # descriptors assumed where the system sets no limit


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of client connections. Times are in seconds."""

    connections: int  # connections served at once
    refusals: int  # refused connections that stay open at once to read their 503; further ones are aborted
    held: int  # bytes in flight on all connections together
    headers: float  # time from a request's first byte to the end of its headers
    body: float  # time for reading a request's whole body
    idle: float  # time between two requests
    unread: float  # time during which the client reads nothing of its answer
    websocket: float  # time without a byte from the client of a websocket


def connection_limits(config: Config) -> ConnectionLimits:
    """Return the limits that the options set. The limit on open files caps the number of connections."""
    return ConnectionLimits(
        connections=max(1, min(config.max_connections, descriptor_limit() - OTHER_DESCRIPTORS - REFUSALS)),
        refusals=REFUSALS,
        held=max(config.bytes_in_flight, config.body_limit),
        headers=config.header_timeout,
        body=config.body_timeout,
        idle=config.idle_timeout,
        unread=config.unread_timeout,
        websocket=config.websocket_timeout,
    )


def router_limits(config: Config) -> ConnectionLimits:
    """Return the limits of a router: a client may need a connection to an engine, and each engine's events need one."""
    limits = connection_limits(config)
    left = descriptor_limit() - OTHER_DESCRIPTORS - REFUSALS - len(config.engine)
    return replace(limits, connections=max(1, min(limits.connections, left // 2)))


def raise_descriptor_limit() -> None:
    """Raise the limit on open files to the hard limit."""
    if sys.platform != "win32":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError, OSError):  # Some systems refuse an infinite soft limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Return how many files this process may have open."""
    if sys.platform == "win32":
        return UNLIMITED
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else UNLIMITED
