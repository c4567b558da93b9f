"""The state that all handlers share: options, gateway, metrics, the loaded model, and the phase of the server."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from aiohttp import web

from baton.actors.runtime.watching import StateWatch
from baton.api import errors
from baton.api.config import Config
from baton.api.generation.gateway import Gateway
from baton.api.generation.outputs import Generation
from baton.api.generation.served_model import ServedModel
from baton.api.telemetry.collectors import RingFigures
from baton.api.telemetry.metrics import Metrics
from baton.api.telemetry.spans import Spans


class RingView(RingFigures, Protocol):
    """A read-only view of the relay for handlers: counters, the audit of leases, slots and tree."""

    def audit(self) -> Sequence[object]: ...

    def token_seconds(self) -> float: ...

    def step_seconds(self) -> float: ...

    def running_rows(self) -> int: ...

    def ended_rows(self) -> int: ...

    def slots_by_use(self) -> dict[str, int]: ...

    def watch_states(self) -> StateWatch: ...

    def unwatch_states(self) -> None: ...

    def debug_peers(self) -> list[dict[str, object]]: ...

    def debug_slots(self) -> list[dict[str, object]]: ...

    def debug_tree(self) -> list[dict[str, object]]: ...


# Names of the model for clients that do not know it. Hugging Face's clients send "dummy" if they are given no name.
UNNAMED = ("default", "dummy")


@dataclass
class Server:
    """The state that all handlers share."""

    config: Config
    gateway: Gateway
    metrics: Metrics
    name: str  # the model's name in the API
    model: ServedModel | None = None  # None until the model is loaded
    relay: RingView | None = None  # None until the ring is made
    spans: Spans | None = None  # None if spans are not exported
    other_names: tuple[str, ...] = ()  # further names under which requests may ask for the model
    phase: Literal["loading", "ready", "draining"] = "loading"  # never goes back
    started: float = field(default_factory=time.time)  # Unix time
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def record_end(self, generation: Generation, error: str | None) -> None:
        """Record the metrics and the span of an ended generation. error: the error code that the client got, if any."""
        for member in generation.members:
            self.metrics.record_end(member, self.gateway.clock())
        if self.spans is not None:
            self.spans.record_end(generation, error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that may outlive the request that started it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_tasks(self) -> None:
        """Fail all open requests and wait for all spawned tasks. Call this after the ring has ended."""
        self.gateway.fail_all(errors.draining())
        if self._tasks:
            await asyncio.wait(self._tasks)

    def ready(self, model: str | None = None) -> ServedModel:
        """Return the model. model: its name in the request. Raises ApiError 503 unless ready, 404 for a wrong name."""
        if self.phase == "draining":
            raise errors.draining()
        loaded = self.loaded()
        if model is not None and model not in (self.name, *self.other_names, *UNNAMED):
            raise errors.unknown_model(model, self.name)
        return loaded

    def loaded(self) -> ServedModel:
        """Return the loaded model, even while draining. Raises ApiError 503 while loading.

        Handlers of sessions call this too, because sessions are restored only when the model is loaded.
        """
        if self.model is None:
            raise errors.loading()
        return self.model


SERVER = web.AppKey("server", Server)
