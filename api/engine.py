"""What the handlers know: the loaded model's text side and limits, and the server's state."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from aiohttp import web

from api import errors
from api.config import Config
from api.gateway import Gateway
from api.metrics import Metrics
from api.response_store import ResponseStore
from api.session_store import SessionStore


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

    def audit(self) -> Sequence[object]: ...

    def debug_slots(self) -> list[dict[str, object]]: ...

    def debug_tree(self) -> list[dict[str, object]]: ...


@dataclass(frozen=True)
class Engine:
    """A loaded model. max_model_len counts prompt and answer together; `info` is shown by /model_info."""

    text: Text
    vocab_size: int
    max_model_len: int
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Server:
    """The state that all handlers share. The phase goes loading → ready → draining."""

    config: Config
    gateway: Gateway
    metrics: Metrics
    name: str
    engine: Engine | None = None
    relay: Relay | None = None
    phase: Literal["loading", "ready", "draining"] = "loading"
    started: float = field(default_factory=time.time)
    sessions: SessionStore = field(init=False)
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.config.response_retention)
        self.sessions = SessionStore(self.config.session_cap, self.config.session_idle_timeout)

    def ready(self, model: str | None = None) -> Engine:
        """The engine, for a request that names `model`. Raises 503 while loading or draining, 404 for another model."""
        if self.phase == "draining":
            raise errors.unavailable("the server is shutting down", "draining")
        if self.engine is None:
            raise errors.unavailable("the model is loading", "loading")
        if model is not None and model not in (self.name, "default"):
            raise errors.unknown_model(model, self.name)
        return self.engine


SERVER = web.AppKey("server", Server)
