"""The limits of connections, from the options and from the limit on open files."""

import sys
from contextlib import suppress
from dataclasses import dataclass

from baton.api.config import Config

if sys.platform != "win32":
    import resource

OTHER_DESCRIPTORS = 256  # reserved for files, pipes of threads, libraries
REFUSALS = 64
UNLIMITED = 2**20  # descriptors assumed where the system sets no limit


@dataclass(frozen=True)
class ConnectionLimits:
    """Maxima of connections. Times are in seconds."""

    connections: int  # served at once
    refusals: int  # that read their 503 at once; more are aborted
    held: int  # bytes in flight on all connections
    headers: float  # from a request's first byte to the end of its headers
    body: float  # for the whole body
    idle: float  # between requests
    unread: float  # without the client reading any of its answer
    websocket: float  # without a byte from a websocket's client


def connection_limits(config: Config) -> ConnectionLimits:
    """Return the limits. The number of connections is capped by the limit on open files."""
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


def raise_descriptor_limit() -> None:
    """Raise the limit on open files to the hard limit."""
    if sys.platform != "win32":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError, OSError):  # Some systems refuse a limit of infinity.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Return how many files this process may have open."""
    if sys.platform == "win32":
        return UNLIMITED
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else UNLIMITED
