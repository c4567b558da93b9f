"""The TOML file that describes a cluster: its format and its checks."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from baton.api import config as configuration
from baton.api.config import ConfigError
from baton.api.security import read_small

Count = Annotated[int, Meta(ge=0, le=1000)]
Seconds = Annotated[float, Meta(gt=0, le=1e7)]
OF_PROCESS = frozenset(
    {
        "model", "host", "port", "engine", "engine_name", "peer", "peer_listen", "peer_key_file", "drain_to",
    }
)  # fmt: skip
"""Options that the cluster sets itself."""
WITHOUT_TLS = "a cluster's processes use plain HTTP: remove it, and put a proxy with TLS in front of the router"
NOT_IN_CLUSTERS = {
    "uds": "a cluster's processes listen on TCP: remove it; the router listens on `host` and `port` of [router]",
    "tls_cert": WITHOUT_TLS,
    "tls_key": WITHOUT_TLS,
}
"""Options with which the supervisor could not reach a process: why, and what to do instead."""


class EngineGroup(Struct, forbid_unknown_fields=True, kw_only=True):
    """A group of engines with the same options."""

    replicas: Count | None = None  # number of engines; replaces `min` and `max`
    min: Count = 1  # least number of engines
    max: Count | None = None  # greatest number of engines [min]
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None  # first engine's; then the next ports [free ones]
    cpus: Annotated[float, Meta(gt=0)] = 1.0  # CPUs of each engine; only Ray uses this
    gpus: Count = 0  # GPUs of each engine
    resources: dict[str, float] = {}  # further resources that Ray reserves for each engine
    variables: dict[str, str] = {}  # environment variables of each engine
    options: dict[str, Any] = {}  # options of `baton serve`, such as role = "prefill"

    @property
    def least(self) -> int:
        return self.min if self.replicas is None else self.replicas

    @property
    def most(self) -> int:
        most = self.max if self.replicas is None else self.replicas
        return self.least if most is None else most


class Scaling(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The conditions under which engines are added to a group and removed from it."""

    queue: Seconds = 1.0  # add an engine if a group's mean queue is longer than this, in seconds
    up_after: Seconds = 5.0  # how long the queue must have been longer, in seconds
    down_after: Seconds = 120.0  # remove an engine if one fewer could have done the work for this many seconds


class ClusterFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A cluster: one router, and groups of engines that serve one model."""

    engines: Annotated[dict[Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]*$")], EngineGroup], Meta(min_length=1)]
    model: str | None = None  # a folder, relative to the file's folder, or a name on the hub [the bundled model]
    launcher: Literal["local", "ray"] = "local"
    linked: bool = True  # whether engines exchange states, and hand their sessions and states over when they leave
    options: dict[str, Any] = {}  # options of `baton serve` for every engine
    router: dict[str, Any] = {}  # options of `baton route`
    scaling: Scaling = Scaling()
    ray: dict[str, Any] = {}  # arguments of ray.init, such as address = "auto"


def read_cluster(path: Path) -> ClusterFile:
    """Read and check a cluster's file. Raises ConfigError, which names the wrong entry."""
    try:
        values = tomllib.loads(read_small(str(path)).decode())
        cluster = msgspec.convert(values, ClusterFile)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    check_options(f"{path}: router", cluster.router, OF_PROCESS - {"host", "port"})
    for name, group in cluster.engines.items():
        where = f"{path}: engines.{name}"
        if group.most < group.least:
            raise ConfigError(f"{where}: max = {group.most} is less than min = {group.least}")
        check_options(where, cluster.options | group.options, OF_PROCESS)
    return cluster


def check_options(where: str, options: dict[str, Any], fixed: frozenset[str]) -> None:
    """Raise ConfigError for an unknown option, a wrong value, or an option that the file may not set.

    fixed: options that the cluster sets itself
    """
    known = {field.name for field in configuration.fields()}
    for name in options:
        if name not in known:
            raise ConfigError(f"{where}: there is no option {name!r}")
        if name in fixed:
            raise ConfigError(f"{where}: the cluster sets {name!r} itself")
        if name in NOT_IN_CLUSTERS:
            raise ConfigError(f"{where}: {name!r} is not possible, because {NOT_IN_CLUSTERS[name]}")
    try:
        configuration.load(options, {})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
