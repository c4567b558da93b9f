"""Every option of the server: one Struct, from which the command line, --help and the environment are made."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from baton.actors.cache.worth.order import Policy
from baton.actors.requests import Speculation
from baton.actors.scheduler.strategy import Strategy
from baton.models.loading.pooling import PoolingOption

AtLeastZero: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
AtLeastTwo: TypeAlias = Annotated[int, Meta(ge=2, le=2**31 - 1)]
Bytes: TypeAlias = Annotated[int, Meta(ge=1)]
Few: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def group(title: str) -> Meta:
    """Return metadata that puts an option under a heading of --help. Headings have the order of Config's fields."""
    return Meta(extra={"group": title})


# Marks a number of bytes, which may be written as 512M or 4G.
SIZE = Meta(extra={"size": True})

MODEL = group("model")
MEMORY = group("memory and slots")
SCHEDULING = group("scheduling")
SPEED = group("speed")
SESSIONS = group("sessions and storage")
NETWORK = group("network")
PEERS = group("peers")
SECURITY = group("security")
OBSERVABILITY = group("observability")
DEBUGGING = group("recovery and debugging")


class ConfigError(Exception):
    """An invalid value of an option. The message names the option or environment variable that the user set."""


class Config(Struct, frozen=True, kw_only=True):
    """Options of all commands, each with its group, range and help text. `baton serve` has all but `engine`.

    None means that the value is chosen at startup; the help text then ends with the rule for it, in brackets.
    """

    model: Annotated[
        str | None, MODEL, Meta(description="checkpoint folder or hub name, ORG/NAME[@REVISION] [the bundled example]")
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        MODEL,
        Meta(description="name in the API; repeatable, answers have the first [the folder's; baton for the example]"),
    ] = ()
    max_model_len: Annotated[
        AtLeastTwo | None,
        MODEL,
        Meta(description="maximum tokens of prompt and answer together [the model's limit, at most 131072]"),
    ] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], MODEL, Meta(description="dtype of the weights")] = "auto"
    quantize: Annotated[
        Literal["none", "int8", "int4"],
        MODEL,
        Meta(description="quantize projection weights at load: int8 takes 1/2 of bfloat16's memory, int4 1/4"),
    ] = "none"
    activation_dtype: Annotated[
        Literal["auto", "int8"], MODEL, Meta(description="int8: round inputs of integer weights; faster, less exact")
    ] = "auto"
    tool_parser: Annotated[
        Literal["auto", "granite4", "hermes", "kimi", "lfm2", "nemotron_v2", "qwen3_coder", "none"],
        MODEL,
        Meta(description="format of the model's tool calls; auto detects it from chat template and family"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"], MODEL, Meta(description="format of reasoning; auto: from the chat template")
    ] = "auto"
    reasoning_budget: Annotated[AtLeastZero | None, MODEL, Meta(description="limit of reasoning tokens [none]")] = None
    preserve_reasoning: Annotated[
        bool, MODEL, Meta(description="show the model its reasoning of earlier turns, where the template can")
    ] = False
    pooling: Annotated[
        PoolingOption, MODEL, Meta(description="hidden states that embeddings are made of; auto: as modules.json says")
    ] = "auto"

    memory: Annotated[
        Bytes | None,
        MEMORY,
        SIZE,
        Meta(description="bytes for state slots and KV pages together, as 4G [a part of the free memory]"),
    ] = None
    state_slots: Annotated[AtLeastTwo | None, MEMORY, Meta(description="number of state slots [from --memory]")] = None
    state_dtype: Annotated[
        Literal["float32", "bfloat16"],
        MEMORY,
        Meta(description="dtype of recurrent states; bfloat16 halves their memory but rounds at every token"),
    ] = "float32"
    state_strategy: Annotated[
        Strategy,
        MEMORY,
        Meta(
            description="when a request gets checkpoint slots: never, from admission on (all, or one and more later), "
            "or just before a checkpoint"
        ),
    ] = Strategy.JUST_IN_TIME
    tree_slots: Annotated[AtLeastZero, MEMORY, Meta(description="state slots reserved for cached states")] = 0
    kv_pages: Annotated[
        AtLeastOne | None, MEMORY, Meta(description="number of pages for attention keys and values [from --memory]")
    ] = None
    page_size: Annotated[int, MEMORY, Meta(ge=1, le=1024, description="tokens per KV page")] = 16
    host_memory: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        MEMORY,
        SIZE,
        Meta(
            description="bytes of host memory for states that were evicted from their slots; page-locked at the start "
            "for a GPU [1/8 of what is free, with a GPU at most 64G]"
        ),
    ] = None
    cache_policy: Annotated[
        Policy, MEMORY, Meta(description="cached states to evict first: those worth least, or the least recently used")
    ] = "worth"
    track_interval: Annotated[
        AtLeastZero, MEMORY, Meta(description="tokens between checkpoints of an answer's state; 0 makes none")
    ] = 256

    max_running: Annotated[
        Few | None, SCHEDULING, Meta(description="maximum requests that run at once [256 on a GPU, otherwise 16]")
    ] = None
    max_queue: Annotated[AtLeastZero, SCHEDULING, Meta(description="maximum requests that wait; more get 429")] = 1024
    request_timeout: Annotated[
        float,
        SCHEDULING,
        Meta(gt=0, le=1e7, description="seconds until a request is ended with 504, time in the queue included"),
    ] = 600.0
    step_tokens: Annotated[
        AtLeastTwo | None,
        SCHEDULING,
        Meta(
            description="maximum tokens in a step, of prompt chunks and decoding rows together "
            "[2048 to 8192 on a GPU, by its free memory; otherwise 512]"
        ),
    ] = None
    step_time: Annotated[
        float,
        SCHEDULING,
        Meta(
            ge=0,
            description="maximum seconds of a step that mixes prompts and decoding; 0: four decoding steps, "
            "or twice the shortest mixed step if that is longer",
        ),
    ] = 0.0
    no_overlap: Annotated[
        bool, SCHEDULING, Meta(description="plan a step only after the previous step's tokens are known")
    ] = False

    device: Annotated[str, SPEED, Meta(description="auto, cpu, cuda or cuda:N")] = "auto"
    kernels: Annotated[
        Literal["native", "torch"],
        SPEED,
        Meta(
            description="native: C++ on a CPU, from the wheel or compiled at the first start, and Triton on a GPU; "
            "or torch only"
        ),
    ] = "native"
    threads: Annotated[Few | None, SPEED, Meta(description="CPU threads [1 for small models, else all]")] = None
    speculation: Annotated[
        Speculation,
        SPEED,
        Meta(
            description="drafts that a step verifies, where they pay: from the request's own text (ngram), from the "
            "model's head for multi-token prediction (mtp), or from both (auto)"
        ),
    ] = "auto"
    tf32: Annotated[bool, SPEED, Meta(description="use TF32 tensor cores for float32 products: less exact")] = False

    session_dir: Annotated[
        str | None, SESSIONS, Meta(description="folder in which sessions survive a restart [none: kept in memory]")
    ] = None
    session_disk: Annotated[
        int, SESSIONS, SIZE, Meta(ge=2**20, description="maximum bytes on disk under --session-dir")
    ] = 10 * 2**30
    session_cap: Annotated[
        AtLeastOne, SESSIONS, Meta(description="maximum sessions; a new one replaces the least recently used")
    ] = 1024
    session_idle_timeout: Annotated[
        float,
        SESSIONS,
        Meta(gt=0, le=1e9, description="seconds until an unused session is suspended, or closed without --session-dir"),
    ] = 86400.0
    session_slots: Annotated[AtLeastZero | None, SESSIONS, Meta(description="most slots of idle sessions [all]")] = None
    session_log: Annotated[
        Bytes, SESSIONS, SIZE, Meta(description="maximum bytes of a session's log; a full one takes no more turns")
    ] = 2**24
    session_memory: Annotated[
        int, SESSIONS, SIZE, Meta(ge=2**20, description="maximum bytes of all sessions, without --session-dir")
    ] = 2**30
    response_retention: Annotated[
        float, SESSIONS, Meta(ge=0, le=1e9, description="seconds that a response stays stored; 0 stores none")
    ] = 86400.0
    response_memory: Annotated[int, SESSIONS, SIZE, Meta(ge=0, description="maximum bytes of stored responses")] = 2**28

    host: Annotated[
        str, NETWORK, Meta(description="address to listen on; 0.0.0.0: all of IPv4, :: all of IPv4 and IPv6")
    ] = "127.0.0.1"
    port: Annotated[int, NETWORK, Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one")] = 8000
    uds: Annotated[str | None, NETWORK, Meta(description="Unix socket to listen on instead [none]")] = None
    tls_cert: Annotated[str | None, NETWORK, Meta(description="file with the TLS certificate chain [none]")] = None
    tls_key: Annotated[str | None, NETWORK, Meta(description="file with its private key [none]")] = None
    body_limit: Annotated[int, NETWORK, SIZE, Meta(ge=1024, description="maximum bytes of a request body")] = 2**24
    bytes_in_flight: Annotated[
        Bytes,
        NETWORK,
        SIZE,
        Meta(description="maximum bytes in flight (bodies, messages, unread answers); the largest holder is cut off"),
    ] = 2**28
    max_connections: Annotated[
        AtLeastOne, NETWORK, Meta(description="maximum connections; a new one replaces an idle one, or gets 503")
    ] = 4096
    header_timeout: Annotated[
        float, NETWORK, Meta(gt=0, le=1e7, description="seconds within which a request's headers must arrive")
    ] = 30.0
    body_timeout: Annotated[
        float, NETWORK, Meta(gt=0, le=1e7, description="seconds within which a request's body must arrive")
    ] = 120.0
    idle_timeout: Annotated[
        float, NETWORK, Meta(gt=0, le=1e7, description="seconds until a connection without a request is closed")
    ] = 75.0
    unread_timeout: Annotated[
        float,
        NETWORK,
        Meta(gt=0, le=1e7, description="seconds until a connection is closed whose client reads none of its answer"),
    ] = 120.0
    websocket_timeout: Annotated[
        float,
        NETWORK,
        Meta(gt=0, le=1e7, description="seconds until a websocket is closed that sends nothing, not even pongs"),
    ] = 3600.0
    ping_interval: Annotated[
        float, NETWORK, Meta(gt=0, le=1e7, description="seconds of silence after which a stream gets a comment")
    ] = 15.0
    drain_timeout: Annotated[
        float, NETWORK, Meta(ge=0, le=1e7, description="seconds that running requests get to finish after SIGTERM")
    ] = 30.0

    peer: Annotated[
        tuple[str, ...],
        PEERS,
        Meta(description="address of another engine of the same model, HOST:PORT or unix:PATH; repeatable"),
    ] = ()
    peer_listen: Annotated[
        str | None, PEERS, Meta(description="address to listen on for other engines, HOST:PORT or unix:PATH [none]")
    ] = None
    peer_key_file: Annotated[
        str | None, PEERS, Meta(description="file with a secret that all engines share [none: only loopback addresses]")
    ] = None
    role: Annotated[
        Literal["both", "prefill", "decode"],
        PEERS,
        Meta(description="preferred work: decode asks peers to compute long prompts, prefill computes for others"),
    ] = "both"
    peer_mover: Annotated[
        Literal["sockets", "nixl"],
        PEERS,
        Meta(description="how states travel between engines; nixl (RDMA, shared memory) needs the extra peers"),
    ] = "sockets"
    engine_name: Annotated[str | None, PEERS, Meta(description="name of this engine for its peers [HOST:PORT]")] = None
    drain_to: Annotated[
        str | None, PEERS, Meta(description="name of the engine that takes over the sessions after SIGTERM [none]")
    ] = None
    engine: Annotated[tuple[str, ...], PEERS, Meta(description="URL of an engine; repeatable")] = ()
    api_key: Annotated[
        tuple[str, ...],
        SECURITY,
        Meta(description="API key to accept; repeatable, separated by commas in the environment"),
    ] = ()
    api_key_file: Annotated[
        str | None, SECURITY, Meta(description="file with more API keys to accept, one per line [none]")
    ] = None
    share_cache: Annotated[
        bool, SECURITY, Meta(description="let requests of different API keys reuse each other's cached prompts")
    ] = False
    cors: Annotated[
        tuple[str, ...],
        SECURITY,
        Meta(description="web origin whose pages may call the server, as https://example.org, or *; repeatable"),
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        SECURITY,
        Meta(description="additional host name under which clients may call the server, or *; repeatable"),
    ] = ()

    log_format: Annotated[
        Literal["auto", "json", "console"],
        OBSERVABILITY,
        Meta(description="format of the log; auto: console on a terminal, otherwise json"),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        OBSERVABILITY,
        Meta(description="least severe events to log; debug includes every move of a lease"),
    ] = "info"
    trace_file: Annotated[
        str | None,
        OBSERVABILITY,
        Meta(description="file to write every message, step and slot move to, for scripts/trace [none]"),
    ] = None
    otel: Annotated[
        bool,
        OBSERVABILITY,
        Meta(description="export one OpenTelemetry span per request; set the destination with OTEL_* variables"),
    ] = False

    restarts: Annotated[
        AtLeastZero,
        DEBUGGING,
        Meta(description="maximum engine restarts per minute after internal errors; one more ends the process"),
    ] = 3
    codec_check: Annotated[
        bool, DEBUGGING, Meta(description="encode and decode every message between actors, to test the codec")
    ] = False
    poison_freed: Annotated[
        bool, DEBUGGING, Meta(description="overwrite freed slots, so that reads of stale states become visible")
    ] = False

    @property
    def log_disk(self) -> int:
        """The part of --session-disk for token logs of sessions, in bytes; the rest is for states."""
        return self.session_disk // 10

    @property
    def state_disk(self) -> int:
        """The part of --session-disk for states, in bytes."""
        return self.session_disk - self.log_disk

    def redacted(self) -> dict[str, Any]:
        """Return all options with the API keys masked."""
        options: dict[str, Any] = msgspec.to_builtins(self)
        options["api_key"] = ["***"] * len(self.api_key)
        return options


def flag(field: str) -> str:
    """Return the command-line option of a field of Config, such as --max-running."""
    return "--" + field.replace("_", "-")


def variable(field: str) -> str:
    """Return the environment variable of a field of Config, such as BATON_MAX_RUNNING."""
    return "BATON_" + field.upper()


def is_size(field: msgspec.inspect.Field) -> bool:
    """Return whether an option is a number of bytes, which may be written as 512M or 4G."""
    return bool((metadata(field).extra or {}).get("size"))


def choices(field: msgspec.inspect.Field) -> list[str]:
    """Return the values of an option that is one of several; [] for other options."""
    kind = metadata(field).type
    if isinstance(kind, msgspec.inspect.EnumType):
        return list(kind.cls)
    return [str(value) for value in kind.values] if isinstance(kind, msgspec.inspect.LiteralType) else []


def metadata(field: msgspec.inspect.Field) -> msgspec.inspect.Metadata:
    assert isinstance(field.type, msgspec.inspect.Metadata)
    return field.type


def fields() -> tuple[msgspec.inspect.Field, ...]:
    """Return the fields of Config in their order, with types and metadata."""
    info = msgspec.inspect.type_info(Config)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


def load(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Config:
    """Build the configuration. Command-line options override BATON_* variables, which override defaults.

    Raises ConfigError, which names the wrong option or variable.
    """
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for field in fields():
        name = field.name
        if options.get(name) is not None:
            values[name], source[name] = options[name], flag(name) if name != "model" else "MODEL"
        elif (text := environment.get(variable(name))) or (text is not None and name == "api_key"):
            # An empty variable is unset. `check` refuses an empty BATON_API_KEY: the server is meant to require keys.
            values[name], source[name] = text, variable(name)
        else:
            continue
        if isinstance(field.default, tuple) and isinstance(values[name], str):
            values[name] = [part.strip() for part in values[name].split(",") if part.strip()]
        if name != "api_key":  # Keys are bytes, see api/security.py:digest.
            check_text(values[name], source[name])
        if is_size(field):
            values[name] = parse_size(values[name], source[name])
    try:
        config = msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = re.split(r"[.\[`]", path)[0]
        if listed := next((choices(field) for field in fields() if field.name == name), []):
            message = f"expected {', '.join(listed)}"
        raise ConfigError(f"{source.get(name, name)}: {message}, not {values.get(name)!r}") from None
    check(config, source)
    return config


def check(config: Config, source: Mapping[str, str]) -> None:
    """Check rules that types and ranges of the fields cannot express. Raises ConfigError."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise ConfigError(f"{source.get('device')}: expected auto, cpu or cuda, not {config.device!r}")
    for origin in config.cors:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ConfigError(f"{source.get('cors')}: expected an origin like https://example.org or *, not {origin!r}")
    if empty := next((source[name] for name in source if getattr(config, name) == ""), None):
        raise ConfigError(f"{empty}: a value is missing")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together")
    if any(not key.strip() for key in config.api_key):
        raise ConfigError(f"{source.get('api_key')}: an API key must not be empty")
    if "api_key" in source and not config.api_key:
        raise ConfigError(f"{source['api_key']}: it holds no key; unset it to serve without keys")


def check_text(value: object, source: str) -> None:
    """Raise ConfigError for bytes that are not UTF-8, which Python passes on as surrogates."""
    try:
        "".join(map(str, value if isinstance(value, list) else [value])).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{source}: expected UTF-8, not {value!r}") from None


def parse_size(text: object, source: str) -> int:
    """Convert a size such as 512M or 1.5G (powers of 1,024) to bytes. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kmgt]?)i?b?", str(text).strip().lower())
    if match is None or (size := int(float(match[1]) * UNITS[match[2]])) > 2**53:
        raise ConfigError(f"{source}: expected a size such as 512M or 4G, not {text!r}")
    return size
