"""The links of a server to its peers: their options, their parts, and the tasks that keep them connected."""

import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

import anyio

from baton.actors.peers import channel as channels
from baton.actors.peers.engines import PeerEngines
from baton.actors.peers.frames import VERSION, Beat, Hello
from baton.actors.peers.mover import Pulled
from baton.actors.peers.nixl import NixlCarrier, load_nixl
from baton.actors.peers.node import PeerNode
from baton.actors.peers.sockets import SocketCarrier
from baton.actors.peers.threads import Carrier, ThreadedMover
from baton.actors.runtime.explain import CachedState
from baton.actors.runtime.sizing import PoolSizes
from baton.actors.storage.host_memory import HostStates
from baton.api.config import Config, ConfigError
from baton.api.generation.gateway import Gateway
from baton.api.generation.served_model import ServedModel
from baton.api.peering.moves import Moves
from baton.api.peering.options import read_key
from baton.api.peering.requests import PeerRequests
from baton.api.sessions.store import SessionStore
from baton.api.telemetry.metrics import Metrics


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

    def states_without_session(self) -> list[CachedState]:
        """Return the cached states that belong to no session, the state of most worth first."""
        ...


class Peering:
    """The links of a server to its peers."""

    def __init__(
        self,
        config: Config,
        model: str,
        dtype: str,
        sizes: PoolSizes,
        host: HostStates,
        served: ServedModel,
    ) -> None:
        """model: fingerprint of the weights and of the layout of states. dtype: dtype of the weights.

        Raises ConfigError for invalid options, and OSError if the server cannot listen at --peer-listen.
        """
        self._config, self._host, self._served, self._key = config, host, served, read_key(config)
        self._make_carrier = carriers(config, host)
        self._listening = channels.listen(config.peer_listen) if config.peer_listen is not None else None
        self.hello = Hello(
            VERSION,
            config.engine_name or f"{config.host}:{config.port}",
            secrets.token_hex(8),
            config.role,
            model,
            dtype,
            config.state_dtype,
            config.quantize if config.activation_dtype == "auto" else f"{config.quantize} with int8 activations",
            sizes.page_size if sizes.pages else 0,
            sizes.slot_bytes,
            sizes.page_bytes if sizes.pages else 0,
            config.peer_mover,
        )

    def connect(self, gateway: Gateway) -> PeerEngines:
        """Create the part that connects the ring to the peers. Call `watch` before `run`."""
        self._gateway = gateway
        requests = PeerRequests(gateway, self._served.vocab_size, self._served.max_model_len)
        self._engines = PeerEngines(self.hello, self._host, requests, self._load, self._trace_of)
        requests.computed = self._engines.computed
        return self._engines

    def watch(self, ring: RingLoad) -> None:
        """Set the ring whose load is sent to the peers."""
        self._ring = ring

    def serve_sessions(self, sessions: SessionStore, accepts: Callable[[bytes], bool]) -> Moves:
        """Let sessions move between this server and its peers.

        accepts: returns whether requests with the API key of this digest are accepted here.
        """
        moves = sessions.mover = Moves(
            self._engines, sessions, self._served.vocab_size, accepts, lambda: self._ring.states_without_session()
        )
        return moves

    def watched_by(self, metrics: Metrics) -> None:
        """Add the links to the metrics."""
        metrics.watch_peers(self._engines)

    async def run(self) -> None:
        """Listen for peers and stay connected to the configured ones, until cancelled."""
        node = PeerNode(self._engines, self._mover, self._key)
        async with anyio.create_task_group() as tasks:
            if self._listening is not None:
                tasks.start_soon(node.serve, self._listening)
            for address in self._config.peer:
                tasks.start_soon(node.keep_connected, address)

    def _mover(self, reads: socket.socket, serves: socket.socket, pulled: Pulled) -> ThreadedMover:
        return ThreadedMover(self._make_carrier(), self._host, reads, serves, pulled)

    def _load(self) -> Beat:
        token, waiting = self._ring.token_seconds(), self._gateway.waiting_prompt_tokens()
        takes_none = self._gateway.draining or self._gateway.paused is not None
        return Beat(waiting * token, token, self._ring.running_rows(), takes_none)

    def _trace_of(self, grant: int) -> str:
        return self._ring.trace_of(grant)


def carriers(config: Config, host: HostStates) -> Callable[[], Carrier]:
    """Return a function that makes a link's carrier. Raises ConfigError if --peer-mover needs a missing package."""
    if config.peer_mover == "sockets":
        return SocketCarrier
    try:
        binding = load_nixl()
    except ImportError as error:
        raise ConfigError(f"--peer-mover nixl: {error}") from None
    assert host.arena is not None
    return partial(NixlCarrier, binding, host.arena)
