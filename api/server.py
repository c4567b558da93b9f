"""What all handlers share: the options, the gateway to the ring, the loaded model, and the phase of the server."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from aiohttp import web

from baton.api import errors
from baton.api.config import Config
from baton.api.generation.gateway import Gateway
from baton.api.generation.outputs import Generation
from baton.api.generation.served_model import ServedModel
from baton.api.telemetry.collectors import RingFigures
from baton.api.telemetry.metrics import Metrics
from baton.api.telemetry.spans import Spans


class RingView(RingFigures, Protocol):
    """The relay as handlers see it, to read only: figures, the audit of leases, slots and tree."""

    def audit(self) -> Sequence[object]: ...

    def debug_slots(self) -> list[dict[str, object]]: ...

    def debug_tree(self) -> list[dict[str, object]]: ...


@dataclass
class Server:
    """What all handlers share. The phase goes loading → ready → draining.

    name: the model's name in the API. model, relay: None until the model is loaded and the ring is made. spans: None
    if none are exported. started: Unix time.
    """

    config: Config
    gateway: Gateway
    metrics: Metrics
    name: str
    model: ServedModel | None = None
    relay: RingView | None = None
    spans: Spans | None = None
    phase: Literal["loading", "ready", "draining"] = "loading"
    started: float = field(default_factory=time.time)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def record_end(self, generation: Generation, error: str | None) -> None:
        """The figures and the span of an ended generation. error: the code that its client got."""
        for member in generation.members:
            self.metrics.record_end(member, self.gateway.clock())
        if self.spans is not None:
            self.spans.record_end(generation, error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what may outlive the request that began it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_tasks(self) -> None:
        """At the end, when nothing more comes from the ring."""
        self.gateway.fail_all(errors.draining())
        if self._tasks:
            await asyncio.wait(self._tasks)

    def ready(self, model: str | None = None) -> ServedModel:
        """The model, for a request that names `model`. Raises 503 while loading or draining, 404 for another model."""
        if self.phase == "draining":
            raise errors.draining()
        loaded = self.loaded()
        if model is not None and model not in (self.name, "default"):
            raise errors.unknown_model(model, self.name)
        return loaded

    def loaded(self) -> ServedModel:
        """The model, for what a drain does not end. Raises 503 while loading: the folder's sessions come later."""
        if self.model is None:
            raise errors.loading()
        return self.model


SERVER = web.AppKey("server", Server)
