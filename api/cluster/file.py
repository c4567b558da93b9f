"""The file that describes a cluster."""

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
        "uds", "tls_cert", "tls_key",
    }
)  # fmt: skip
"""Options that the cluster sets itself, and those that its supervisor could not follow."""


class EngineGroup(Struct, forbid_unknown_fields=True, kw_only=True):
    """Engines with the same options."""

    replicas: Count | None = None  # how many run; in place of `min` and `max`
    min: Count = 1  # how many run at least
    max: Count | None = None  # how many run at most [min]
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None  # of the first, the next one has the next [free ones]
    cpus: Annotated[float, Meta(gt=0)] = 1.0  # of each; only Ray looks at it
    gpus: Count = 0  # of each
    resources: dict[str, float] = {}  # Ray's further resources of each
    variables: dict[str, str] = {}  # environment variables
    options: dict[str, Any] = {}  # of `baton serve`, such as role = "prefill"

    @property
    def least(self) -> int:
        return self.min if self.replicas is None else self.replicas

    @property
    def most(self) -> int:
        most = self.max if self.replicas is None else self.replicas
        return self.least if most is None else most


class Scaling(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When engines are added and removed."""

    queue: Seconds = 1.0  # add an engine if the queues of a group take longer than this, on average
    up_after: Seconds = 5.0  # seconds that this must last
    down_after: Seconds = 120.0  # remove an engine if one fewer could have done the work for so long


class ClusterFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A cluster: one router, and groups of engines that serve one model."""

    engines: Annotated[dict[Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]*$")], EngineGroup], Meta(min_length=1)]
    model: str | None = None  # a folder, relative to the file's, or a name on the hub [the bundled model]
    launcher: Literal["local", "ray"] = "local"
    linked: bool = True  # whether engines exchange states, and hand over what they have when they leave
    options: dict[str, Any] = {}  # of every engine, as in `baton serve --help`
    router: dict[str, Any] = {}  # options of `baton route`
    scaling: Scaling = Scaling()
    ray: dict[str, Any] = {}  # arguments of ray.init, such as address = "auto"


def read_cluster(path: Path) -> ClusterFile:
    """Read and check a cluster's file. Raises ConfigError, which names what is wrong."""
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
    """Check options of a command. Raises ConfigError. fixed: options that the cluster sets."""
    known = {field.name for field in configuration.fields()}
    for name in options:
        if name not in known:
            raise ConfigError(f"{where}: there is no option {name!r}")
        if name in fixed:
            raise ConfigError(f"{where}: the cluster sets {name!r} itself")
    try:
        configuration.load(options, {})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
