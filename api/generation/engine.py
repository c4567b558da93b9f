"""What the handlers know: the loaded model's text side and limits, and the server's state."""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from aiohttp import web

from actors.runtime.timings import Timings
from api import errors
from api.config import Config
from api.generation.gateway import Gateway
from api.generation.reader import Generation
from api.responses.store import ResponseStore
from api.sessions.files import SessionFiles
from api.sessions.store import SessionStore
from api.telemetry.metrics import Metrics
from api.telemetry.response_metrics import ResponseCollector
from api.telemetry.session_metrics import SessionCollector

LOG_PART = 10  # of --session-disk; the others are for states.


class Text(Protocol):
    """The tokenizer and chat template, as models.text has them."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def generation_defaults(self) -> dict[str, Any]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens, and the positions at which messages end. ValueError if the template refuses the chat."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Relay(Protocol):
    """The ring's figures."""

    def counters(self) -> dict[str, int]: ...

    def gauges(self) -> dict[str, float | dict[str, int]]: ...

    def lease_moves(self) -> Mapping[str, int]: ...

    @property
    def timings(self) -> Timings: ...

    def audit(self) -> Sequence[object]: ...

    def debug_slots(self) -> list[dict[str, object]]: ...

    def debug_tree(self) -> list[dict[str, object]]: ...


class Spans(Protocol):
    """Where spans of requests go."""

    def ended(self, generation: Generation, error: str | None) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Engine:
    """A loaded model. max_model_len counts prompt and answer together; `info` is shown by /model_info."""

    text: Text
    vocab_size: int
    max_model_len: int
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Server:
    """The state that all handlers share. The phase goes loading → ready → draining.

    Raises ConfigError if the folder of the sessions cannot be had.
    """

    config: Config
    gateway: Gateway
    metrics: Metrics
    name: str
    engine: Engine | None = None
    relay: Relay | None = None
    spans: Spans | None = None
    phase: Literal["loading", "ready", "draining"] = "loading"
    started: float = field(default_factory=time.time)
    sessions: SessionStore = field(init=False)
    responses: ResponseStore = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.config.response_retention, self.config.response_memory)
        config = self.config
        self.sessions = SessionStore(
            config.session_cap,
            config.session_idle_timeout,
            self.gateway,
            SessionFiles(Path(config.session_dir)) if config.session_dir is not None else None,
            config.session_disk // LOG_PART,
            config.session_log,
        )
        self.gateway.sessions = self.sessions
        self.metrics.registry.register(SessionCollector(self.name, self.sessions))
        self.metrics.registry.register(ResponseCollector(self.name, self.responses))

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
