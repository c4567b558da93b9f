"""What connections may take, from the options and from what the system gives."""

import sys
from contextlib import suppress
from dataclasses import dataclass

from baton.api.config import Config

if sys.platform != "win32":
    import resource

OTHER_DESCRIPTORS = 256  # of files, threads' pipes, libraries
REFUSALS = 64
UNLIMITED = 2**20


@dataclass(frozen=True)
class ConnectionLimits:
    """connections, refusals: most that are served, and most that are being told 503, at once. held: bytes.

    The others are seconds: for the headers of a request, for its body, between requests, without taking anything of
    an answer, and without a byte from a websocket.
    """

    connections: int
    refusals: int
    held: int
    headers: float
    body: float
    idle: float
    unread: float
    websocket: float


def connection_limits(config: Config) -> ConnectionLimits:
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
    """As far as this process may."""
    if sys.platform != "win32":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError, OSError):  # Some systems refuse a limit of infinity.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    if sys.platform == "win32":
        return UNLIMITED
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else UNLIMITED
