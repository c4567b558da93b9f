"""Whole servers with small random models in this process: HTTP, ring and links to each other are the real ones.

Only the loads that engines report to their peers are set by the tests, so that a test decides which peer is asked.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from aiohttp import web
from aiohttp.test_utils import TestClient

from baton.actors.forward.streams import CpuStream
from baton.actors.peers.engines import PeerEngines
from baton.actors.peers.frames import Beat
from baton.actors.runtime.relay import Relay
from baton.actors.storage.host_memory import HostStates
from baton.api.app import GUARD, make_app
from baton.api.config import Config
from baton.api.generation.gateway import Gateway
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import no_grammars
from baton.api.machine.batch import batch_limits
from baton.api.machine.device import allocate_pools, make_device
from baton.api.peering.links import Peering
from baton.api.server import Server
from baton.api.sessions.store import SESSIONS
from baton.api.telemetry.metrics import Metrics
from baton.api.wiring import build_lower_tiers, build_relay, cpu_arena, size
from baton.models.batch import Model
from baton.models.loading.checkpoint import random_model
from baton.models.text.detokenizer import Detokenizer
from tests.api.fake_ring import VOCAB, FakeText, WatchedServer
from tests.models.oracle import settings_of

LENGTH = 1024  # most tokens of a sequence
BUSY_S = 9.0  # the queue that an engine reports that is not to be asked
PATIENCE_S = 60
Role = Literal["both", "prefill", "decode"]
CPU = torch.device("cpu")


class ByteText(FakeText):
    """A tokenizer for a ring: tokens are bytes."""

    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self.decode, prompt_tail)


@cache
def small_model(family: str) -> Model:
    """Return a small random model of one of the configurations in tests/models/oracle.py."""
    return random_model(settings_of(family, VOCAB), torch.float32, CPU, seed=1)


@dataclass
class LiveEngine:
    """A running server, and a client for it."""

    name: str
    role: Role
    client: TestClient[web.Request, web.Application]
    server: Server
    relay: Relay
    peers: PeerEngines | None
    queue_seconds: float = 0.0  # the load that it reports to its peers

    async def post(self, path: str, body: Any) -> Any:
        """Post a body that is accepted, and return the answer."""
        async with self.client.post(path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def get(self, path: str) -> Any:
        async with self.client.get(path) as response:
            assert response.status == 200
            return await response.json()

    async def generate(self, ids: Sequence[int], count: int = 12, **sampling: Any) -> dict[str, Any]:
        """Generate `count` tokens, greedily unless `sampling` has another temperature."""
        params = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0.0, **sampling}
        answer: dict[str, Any] = await self.post("/generate", {"input_ids": list(ids), "sampling_params": params})
        return answer

    def outcomes(self, outcome: str) -> dict[str, int]:
        """Return the number of states with this outcome, by the peer that was asked or that has asked."""
        assert self.peers is not None
        return {engine: number for (engine, name), number in self.peers.outcomes.items() if name == outcome}

    def beat(self) -> Beat:
        """Return the load that this engine reports. Without a speed a decode engine always asks its best peer."""
        return Beat(self.queue_seconds, 0.0, 0, self.server.gateway.draining)


@dataclass
class Apart:
    """Prefill engines and decode engines, each linked to all of the other role."""

    prefills: list[LiveEngine]
    decodes: list[LiveEngine]

    async def use(self, chosen: LiveEngine) -> None:
        """Let the decode engines ask this prefill engine from now on."""
        for prefill in self.prefills:
            prefill.queue_seconds = 0.0 if prefill is chosen else BUSY_S
        expected = {prefill.name: prefill.queue_seconds for prefill in self.prefills}
        for decode in self.decodes:
            assert decode.peers is not None
            links = decode.peers.links
            await until(
                lambda links=links: {link.peer.engine: link.beat.queue_seconds for link in links.values()} == expected
            )  # type: ignore[misc]


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (links have no event to wait for)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def engine(
    model: Model, name: str, role: Role = "both", folder: Path | None = None, peers: Sequence[str] = (), **options: Any
) -> AsyncIterator[LiveEngine]:
    """Run a server. At its end its ring is drained, and every lease must be home.

    folder: the folder of the peers' sockets; None: a server without peers
    peers: names of the engines to connect to
    """
    if folder is not None:
        options |= {"peer_listen": socket_of(folder, name), "peer": tuple(socket_of(folder, peer) for peer in peers)}
    values = {"engine_name": name, "role": role, "memory": 1 << 24, "host_memory": 1 << 24, "max_running": 8, **options}
    config = Config(device="cpu", max_model_len=LENGTH, **values)
    batch, stream, text = batch_limits(config, False, 0), CpuStream(), ByteText()
    host = HostStates(cpu_arena(config, model))
    sizes = size(config, batch, model, LENGTH, stream, host)
    numbers = sizes.slots, sizes.pages, sizes.page_size
    pools = allocate_pools(model, *numbers, CPU, stream, sizes.max_running, batch.drafts)
    tiers = build_lower_tiers(config, model, sizes, "random", host)
    computes = make_device(model, pools, sizes.max_running, LENGTH, host, stream, batch.step_tokens)
    served = ServedModel(text, VOCAB, LENGTH, {"family": "random"}, max_running=sizes.max_running)
    peering = Peering(config, "random", "float32", sizes, host, served) if folder is not None else None
    metrics = Metrics(name)
    server = Server(config, Gateway(config.request_timeout, metrics), metrics, name, served)
    app = make_app(server)
    relay = build_relay(
        config, batch, model, computes, tiers, sizes, text, no_grammars(), server.gateway, None, peering  # type: ignore[arg-type]
    )  # fmt: skip
    server.relay = relay
    metrics.watch_ring(relay)
    tasks = [asyncio.ensure_future(relay.run())]
    async with TestClient(WatchedServer(app)) as client:
        live = LiveEngine(name, role, client, server, relay, relay.peers)
        if peering is not None and relay.peers is not None:
            relay.peers.load = live.beat
            peering.serve_sessions(app[SESSIONS], app[GUARD].accepts)
            peering.watched_by(metrics)
            tasks.append(asyncio.ensure_future(peering.run()))
        server.phase = "ready"
        try:
            yield live
            assert await server.gateway.drain(PATIENCE_S) == []
            assert relay.audit() == [] and relay.ledger.violations == 0
            assert relay.counters().get("restarts", 0) == 0
        finally:
            for task in reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await app[SESSIONS].close_files()


def socket_of(folder: Path, name: str) -> str:
    return f"unix:{folder / name}"


@asynccontextmanager
async def apart(
    model: Model,
    folder: Path,
    prefills: Sequence[dict[str, Any]] = ({},),
    decodes: Sequence[dict[str, Any]] = ({},),
    **options: Any,
) -> AsyncIterator[Apart]:
    """Run prefill engines and decode engines with links between them, and wait for all links.

    prefills, decodes: for each engine, the options that only it has
    """
    async with AsyncExitStack() as stack:
        names = [f"prefill-{number}" for number in range(len(prefills))]
        listening = [
            await stack.enter_async_context(engine(model, name, "prefill", folder, **options | own))
            for name, own in zip(names, prefills, strict=True)
        ]
        connecting = [
            await stack.enter_async_context(engine(model, f"decode-{number}", "decode", folder, names, **options | own))
            for number, own in enumerate(decodes)
        ]
        cluster = Apart(listening, connecting)
        await cluster.use(listening[0])
        yield cluster
