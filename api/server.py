"""What all handlers share: the options, the gateway to the ring, the loaded model, and the phase of the server."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from aiohttp import web

from api import errors
from api.config import Config
from api.generation.engine import Engine
from api.generation.gateway import Gateway
from api.generation.reader import Generation
from api.telemetry.collectors import RingFigures
from api.telemetry.metrics import Metrics
from api.telemetry.spans import Spans


class RingView(RingFigures, Protocol):
    """The relay, to look at."""

    def audit(self) -> Sequence[object]: ...

    def debug_slots(self) -> list[dict[str, object]]: ...

    def debug_tree(self) -> list[dict[str, object]]: ...


@dataclass
class Server:
    """The phase goes loading → ready → draining."""

    config: Config
    gateway: Gateway
    metrics: Metrics
    name: str
    engine: Engine | None = None
    relay: RingView | None = None
    spans: Spans | None = None
    phase: Literal["loading", "ready", "draining"] = "loading"
    started: float = field(default_factory=time.time)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def ended(self, generation: Generation, error: str | None) -> None:
        """The figures and the span of an ended generation. error: the code that its client got."""
        for member in generation.members:
            self.metrics.ended(member, self.gateway.clock())
        if self.spans is not None:
            self.spans.ended(generation, error)

    def carry(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what may outlive the request that began it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_tasks(self) -> None:
        """At the end, when nothing more comes from the ring."""
        self.gateway.fail_all(errors.unavailable("the server is shutting down", "draining"))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def ready(self, model: str | None = None) -> Engine:
        """The engine, for a request that names `model`. Raises 503 while loading or draining, 404 for another model."""
        if self.phase == "draining":
            raise errors.unavailable("the server is shutting down", "draining")
        engine = self.loaded()
        if model is not None and model not in (self.name, "default"):
            raise errors.unknown_model(model, self.name)
        return engine

    def loaded(self) -> Engine:
        """The engine, for what a drain does not end. Raises 503 while loading: the folder's sessions come later."""
        if self.engine is None:
            raise errors.unavailable("the model is loading", "loading")
        return self.engine


SERVER = web.AppKey("server", Server)
