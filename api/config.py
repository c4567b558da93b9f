"""Every option of the server: one Struct, from which the command line, --help and the environment are made."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from baton.actors.cache.worth.order import Policy
from baton.actors.scheduler.strategy import Strategy

SIZE = {"metavar": "SIZE"}
AtLeastZero: TypeAlias = Annotated[int, Meta(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1)]
AtLeastTwo: TypeAlias = Annotated[int, Meta(ge=2)]
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class ConfigError(Exception):
    """An option has no valid value; the message names it as the user wrote it."""


class Config(Struct, frozen=True, kw_only=True):
    """Options of `baton serve`. None means: chosen at start."""

    model: Annotated[str | None, Meta(description="folder of a Hugging Face checkpoint [the bundled model]")] = None
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one")] = 8000
    served_model_name: Annotated[str | None, Meta(description="the model's name in the API [the folder's name]")] = None
    max_model_len: Annotated[
        AtLeastTwo | None,
        Meta(description="most tokens of a prompt and its answer together [the model's limit, or 131072]"),
    ] = None
    request_timeout: Annotated[
        float, Meta(gt=0, le=1e7, description="seconds after which a request is ended with 504, queueing included")
    ] = 600.0
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Meta(description="type of the weights")] = "auto"
    state_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="type in which recurrent states are kept; bfloat16 halves them, and rounds at every token"),
    ] = "float32"
    quantize: Annotated[
        Literal["none", "int8", "int4"],
        Meta(description="keep the weights of projections as integers: half or a quarter of bfloat16's memory"),
    ] = "none"
    tool_parser: Annotated[
        Literal["auto", "granite4", "hermes", "kimi", "nemotron_v2", "qwen3_coder", "none"],
        Meta(description="how the model writes calls of tools; auto: by its chat template and family"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"],
        Meta(description="how the model marks its reasoning; auto: by its chat template"),
    ] = "auto"
    tf32: Annotated[
        bool, Meta(description="let a GPU round what float32 products multiply to ten bits: faster, and less exact")
    ] = False
    device: Annotated[str, Meta(description="auto, cpu or cuda")] = "auto"
    kernels: Annotated[
        Literal["native", "torch"],
        Meta(description="what computes: C++, compiled at the first start, and Triton on a GPU; or torch"),
    ] = "native"
    threads: Annotated[
        AtLeastOne | None, Meta(description="threads that compute on a CPU [one for a small model, else all]")
    ] = None
    state_slots: Annotated[AtLeastTwo | None, Meta(description="slots for recurrent states [from --memory]")] = None
    state_strategy: Annotated[
        Strategy,
        Meta(description="when a request gets slots for states to keep: never, from its start, or when due"),
    ] = Strategy.JUST_IN_TIME
    tree_slots: Annotated[int, Meta(ge=0, description="slots set aside for cached states")] = 0
    kv_pages: Annotated[AtLeastOne | None, Meta(description="pages of attention keys and values [from --memory]")] = (
        None
    )
    page_size: Annotated[int, Meta(ge=1, le=1024, description="tokens in a page")] = 16
    memory: Annotated[
        AtLeastOne | None,
        Meta(description="memory for states and pages together, as 4G [a part of what is free]", extra=SIZE),
    ] = None
    max_running: Annotated[int, Meta(ge=1, le=4096, description="most requests that run at once")] = 16
    step_tokens: Annotated[int, Meta(ge=2, description="most tokens in a step: prompt chunks and decoded rows")] = 512
    step_time: Annotated[
        float,
        Meta(
            ge=0,
            description="most seconds of a step with prompts beside decoding rows; 0: as long as four without, "
            "or twice what one with hardly any takes",
        ),
    ] = 0.0
    max_queue: Annotated[int, Meta(ge=0, description="most requests that wait; more get 429")] = 1024
    cache_policy: Annotated[
        Policy,
        Meta(description="which states go where slots are short: those worth least, or the least recently used"),
    ] = "worth"
    track_interval: Annotated[
        int, Meta(ge=0, description="keep a state every so many tokens of an answer; 0 keeps none")
    ] = 256
    no_overlap: Annotated[bool, Meta(description="plan a step only when the last one's tokens are known")] = False
    session_cap: Annotated[
        int, Meta(ge=1, description="most sessions; a new one takes the place of the least recently used")
    ] = 1024
    session_idle_timeout: Annotated[
        float,
        Meta(
            gt=0, le=1e9, description="seconds after which an unused session is forgotten, or suspended (--session-dir)"
        ),
    ] = 86400.0
    session_dir: Annotated[
        str | None, Meta(description="folder in which sessions survive a restart [none: they live in memory]")
    ] = None
    session_disk: Annotated[int, Meta(ge=2**20, description="most disk that --session-dir may take", extra=SIZE)] = (
        10 * 2**30
    )
    host_memory: Annotated[
        AtLeastZero | None,
        Meta(description="host memory for states that lost their slot [an eighth of what is free]", extra=SIZE),
    ] = None
    session_slots: Annotated[
        AtLeastZero | None, Meta(description="most slots that sessions may keep between their turns [all]")
    ] = None
    session_log: Annotated[
        AtLeastOne, Meta(description="most bytes of the log of one session; a full one takes no more turns", extra=SIZE)
    ] = 2**24
    response_retention: Annotated[
        float, Meta(ge=0, le=1e9, description="seconds for which responses can be gone on from; 0 stores none")
    ] = 86400.0
    response_memory: Annotated[int, Meta(ge=0, description="most bytes of stored responses", extra=SIZE)] = 2**28
    api_key: Annotated[
        tuple[str, ...], Meta(description="key that clients must send; repeatable, commas in the environment")
    ] = ()
    share_cache: Annotated[
        bool, Meta(description="let requests of different API keys go on from each other's cached prompts")
    ] = False
    api_key_file: Annotated[str | None, Meta(description="file with further keys, one a line")] = None
    cors: Annotated[
        tuple[str, ...],
        Meta(description="web origin that may call the server, as https://example.org, or *; repeatable"),
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        Meta(description="further host name under which the server may be called, or *; repeatable"),
    ] = ()
    body_limit: Annotated[int, Meta(ge=1024, description="largest request body", extra=SIZE)] = 2**24
    bytes_in_flight: Annotated[
        AtLeastOne,
        Meta(
            description="most bytes on their way in and out at once (bodies, queued messages, unread answers); the "
            "connection that holds most of them pays",
            extra=SIZE,
        ),
    ] = 2**28
    max_connections: Annotated[
        AtLeastOne, Meta(description="most connections; a new one takes the place of a silent one, or gets 503")
    ] = 4096
    header_timeout: Annotated[
        float, Meta(gt=0, le=1e7, description="seconds that the headers of a request may take")
    ] = 30.0
    body_timeout: Annotated[float, Meta(gt=0, le=1e7, description="seconds that a body may take")] = 120.0
    idle_timeout: Annotated[
        float, Meta(gt=0, le=1e7, description="seconds after which a connection without a request is closed")
    ] = 75.0
    unread_timeout: Annotated[
        float,
        Meta(gt=0, le=1e7, description="seconds for which a client may read nothing of its answer"),
    ] = 120.0
    websocket_timeout: Annotated[
        float,
        Meta(gt=0, le=1e7, description="seconds after which a websocket that says nothing, pongs included, is closed"),
    ] = 3600.0
    ping_interval: Annotated[
        float, Meta(gt=0, le=1e7, description="seconds of silence before a stream gets a comment")
    ] = 15.0
    drain_timeout: Annotated[
        float, Meta(ge=0, le=1e7, description="seconds that running requests get to finish after SIGTERM")
    ] = 30.0
    restarts: Annotated[
        int, Meta(ge=0, description="times within a minute that the engine may be made anew after an error in it")
    ] = 3
    log_format: Annotated[Literal["auto", "json", "console"], Meta(description="auto: console on a terminal")] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="debug logs every move of a lease")
    ] = "info"
    trace_file: Annotated[
        str | None, Meta(description="write every message, step and move of a slot to this file, for scripts/trace")
    ] = None
    otel: Annotated[
        bool, Meta(description="export a span for each request with OpenTelemetry; its OTEL_* variables say where")
    ] = False
    codec_check: Annotated[bool, Meta(description="encode and decode every message of the ring on its way")] = False
    poison_freed: Annotated[bool, Meta(description="overwrite freed slots, so that a read of a stale state shows")] = (
        False
    )

    def accepted_keys(self) -> tuple[str, ...]:
        """All API keys, those of the file included. Raises ConfigError if it cannot be read or holds none."""
        if self.api_key_file is None:
            return self.api_key
        try:
            with open(self.api_key_file, encoding="utf-8") as file:
                lines = [line.strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: {error}") from None
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise ConfigError(f"--api-key-file: {self.api_key_file} holds no key")
        return self.api_key + keys

    @property
    def log_disk(self) -> int:
        """Bytes of --session-disk for the logs of sessions; the others are for states."""
        return self.session_disk // 10

    @property
    def state_disk(self) -> int:
        return self.session_disk - self.log_disk

    def redacted(self) -> dict[str, Any]:
        """The options as they may be shown: without the keys."""
        options: dict[str, Any] = msgspec.to_builtins(self)
        options["api_key"] = ["***"] * len(self.api_key)
        return options


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable(field: str) -> str:
    return "BATON_" + field.upper()


def is_size(field: msgspec.inspect.Field) -> bool:
    return isinstance(field.type, msgspec.inspect.Metadata) and (field.type.extra or {}) == SIZE


def fields() -> tuple[msgspec.inspect.Field, ...]:
    info = msgspec.inspect.type_info(Config)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


def load(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Config:
    """The configuration from command-line options, else BATON_* variables, else defaults.

    Raises ConfigError naming the option or the variable that is wrong.
    """
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for field in fields():
        name = field.name
        if options.get(name) is not None:
            values[name], source[name] = options[name], flag(name) if name != "model" else "DIR"
        elif (given := environment.get(variable(name))) or (given is not None and name == "api_key"):
            values[name], source[name] = given, variable(name)
            if isinstance(field.default, tuple):
                values[name] = [part.strip() for part in values[name].split(",") if part.strip()]
        else:
            continue
        if is_size(field):
            values[name] = parse_size(values[name], source[name])
    try:
        config = msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = re.split(r"[.\[`]", path)[0]
        raise ConfigError(f"{source.get(name, name)}: {message}, not {values.get(name)!r}") from None
    check(config, source)
    return config


def check(config: Config, source: Mapping[str, str]) -> None:
    """What types and ranges cannot say."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise ConfigError(f"{source.get('device')}: expected auto, cpu or cuda, not {config.device!r}")
    for origin in config.cors:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ConfigError(f"{source.get('cors')}: expected an origin as https://example.org, or *, not {origin!r}")
    if any(not key.strip() for key in config.api_key):
        raise ConfigError(f"{source.get('api_key')}: an API key cannot be empty")
    if "api_key" in source and not config.api_key:
        raise ConfigError(f"{source['api_key']}: there is no key in it; unset it to serve without keys")


def parse_size(text: object, source: str) -> int:
    """Bytes of a size as 512M or 1.5G (powers of 1,024). Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", str(text).strip().lower())
    if match is None:
        raise ConfigError(f"{source}: expected a size as 512M or 4G, not {text!r}")
    return int(float(match[1]) * UNITS[match[2]])
