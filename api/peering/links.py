"""The links of a server to its peers, from the options to the tasks that keep them."""

import ipaddress
import secrets
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio

from baton.actors.peers import channel as channels
from baton.actors.peers.engines import PeerEngines
from baton.actors.peers.frames import VERSION, Beat, Hello
from baton.actors.peers.node import PeerNode
from baton.actors.peers.sockets import NAME, SocketMover
from baton.actors.runtime.sizing import PoolSizes
from baton.actors.storage.host_memory import HostStates
from baton.api.config import Config, ConfigError
from baton.api.generation.gateway import Gateway
from baton.api.generation.served_model import ServedModel
from baton.api.peering.requests import PeerRequests

LEAST_KEY = 16  # bytes


class RingLoad(Protocol):
    """The load of a ring, for its peers."""

    def token_seconds(self) -> float:
        """Return the seconds that one prompt token takes; 0 if that was not measured yet."""
        ...

    def running_rows(self) -> int:
        """Return how many requests have a row."""
        ...

    def trace_of(self, grant: int) -> str:
        """Return the trace id of the request with this grant."""
        ...


class Peering:
    """The links of a server to its peers."""

    def __init__(
        self,
        config: Config,
        model: str,
        sizes: PoolSizes,
        host: HostStates,
        served: ServedModel,
    ) -> None:
        """model: fingerprint of the weights and of the layout of states. Raises ConfigError for invalid options."""
        self._config, self._host, self._served, self._key = config, host, served, read_key(config)
        self._hello = Hello(
            VERSION,
            config.engine_name or f"{config.host}:{config.port}",
            secrets.token_hex(8),
            config.role,
            model,
            sizes.page_size if sizes.pages else 0,
            sizes.slot_bytes,
            sizes.page_bytes if sizes.pages else 0,
            NAME,
        )

    def connect(self, gateway: Gateway) -> PeerEngines:
        """Make the links for a server's ring."""
        self._gateway = gateway
        requests = PeerRequests(gateway, self._served.vocab_size, self._served.max_model_len)
        self._engines = PeerEngines(self._hello, self._host, requests, self._load, self._trace_of)
        requests.computed = self._engines.computed
        return self._engines

    def watch(self, ring: RingLoad) -> None:
        """Set the ring whose load is sent to the peers."""
        self._ring = ring

    async def run(self) -> None:
        """Listen for peers and stay connected to the configured ones, until cancelled."""
        node = PeerNode(self._engines, partial(SocketMover, self._host), self._key)
        async with anyio.create_task_group() as tasks:
            if self._config.peer_listen is not None:
                tasks.start_soon(node.serve, channels.listen(self._config.peer_listen))
            for address in self._config.peer:
                tasks.start_soon(node.keep_connected, address)

    def _load(self) -> Beat:
        token, waiting = self._ring.token_seconds(), self._gateway.waiting_prompt_tokens()
        return Beat(waiting * token, token, self._ring.running_rows(), self._gateway.draining)

    def _trace_of(self, grant: int) -> str:
        return self._ring.trace_of(grant)


def read_key(config: Config) -> bytes:
    """Return the key of --peer-key-file; without one, b"".

    Raises ConfigError if the file is unreadable or its key too short, if an address is none, or if the server would
    listen beyond loopback without a key.
    """
    for option, address in (("--peer-listen", config.peer_listen), *(("--peer", peer) for peer in config.peer)):
        try:
            where = channels.parsed(address)[1] if address is not None else ""
        except ValueError as error:
            raise ConfigError(f"{option}: {error}") from None
        if config.peer_key_file is None and not isinstance(where, str) and not is_loopback(where[0]):
            raise ConfigError(f"{option}: {address} is not a loopback address, which needs --peer-key-file")
    if config.peer_key_file is None:
        return b""
    try:
        key = Path(config.peer_key_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--peer-key-file: {error}") from None
    if len(key) < LEAST_KEY:
        raise ConfigError(f"--peer-key-file: {config.peer_key_file} holds fewer than {LEAST_KEY} bytes")
    return key


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
