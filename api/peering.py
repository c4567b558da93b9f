"""The peers of a server: its links to other engines, and the requests that it computes for them."""

import asyncio
import ipaddress
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio

from baton.actors.peers import channel as channels
from baton.actors.peers.engines import PeerEngines, session_of
from baton.actors.peers.frames import VERSION, Beat, Compute, Hello
from baton.actors.peers.node import PeerNode
from baton.actors.peers.sockets import NAME, SocketMover
from baton.actors.requests import PeerHint, Request, Sampling, Stops
from baton.actors.runtime.sizing import PoolSizes
from baton.actors.storage.host_memory import HostStates
from baton.actors.tokens import count, unpack
from baton.api.config import Config, ConfigError
from baton.api.errors import ApiError
from baton.api.generation.gateway import Gateway
from baton.api.generation.outputs import Generation
from baton.api.generation.served_model import ServedModel

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


class PeerRequests:
    """The requests that compute states for peers. They run like any client's, and draw one token, which is dropped."""

    def __init__(self, gateway: Gateway, vocab_size: int, max_model_len: int) -> None:
        self.computed: Callable[[int, str], None] = lambda loan, error: None  # called when a request has ended
        self._gateway, self._vocab_size, self._max_model_len = gateway, vocab_size, max_model_len
        self._boot = secrets.token_hex(4)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by loan

    def begin(self, loan: int, frame: Compute, link: str) -> str:
        """Submit a request that ends at the state; return "", or why not."""
        length = count(frame.tokens)
        if length >= self._max_model_len or not all(0 <= token < self._vocab_size for token in unpack(frame.tokens)):
            return "the tokens are not of this model"
        request = Request(
            id=f"peer-{self._boot}-{loan}",
            tokens=frame.tokens,
            prompt_len=length,
            sampling=Sampling(temperature=0.0),
            stops=Stops(1),
            priority=frame.priority,
            salt=frame.salt,
            session=session_of(loan),
            flow=link,
            trace=frame.trace,
            hint=PeerHint(link, frame.have),
        )
        try:
            generation = self._gateway.submit([request])
        except ApiError as error:
            return error.message
        self._tasks[loan] = asyncio.ensure_future(self._await(loan, generation))
        return ""

    async def _await(self, loan: int, generation: Generation) -> None:
        error = "aborted"
        try:
            with generation:
                while not generation.finished:
                    await generation.next()
            reason = generation.members[0].finish_reason
            error = "" if reason in ("stop", "length") else str(reason)
        except ApiError as failure:
            error = failure.message
        finally:
            del self._tasks[loan]
        self.computed(loan, error)

    def stop(self, loan: int) -> None:
        """Abort a request."""
        if (task := self._tasks.get(loan)) is not None:
            task.cancel()


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
