"""The processes of a cluster, and the launchers that start them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.api.config import flag


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """The description from which a process of a cluster is started."""

    name: str
    command: str  # "serve" or "route"
    options: Mapping[str, Any]  # options of the command; without `port` the launcher uses a free one
    model: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def arguments(self, host: str, port: int) -> list[str]:
        """Return Python's arguments to run the command. host, port: used unless `options` sets them."""
        options = {"host": host, "port": port, "log_format": "json"} | dict(self.options)
        model = [self.model] if self.model is not None else []
        return [
            "-m",
            "baton.api.cli",
            self.command,
            *model,
            *(part for each in options.items() for part in given(*each)),
        ]


def given(name: str, value: object) -> Sequence[str]:
    """Return an option as arguments of the command line."""
    if isinstance(value, bool):
        return [flag(name)] if value else []
    values = value if isinstance(value, list | tuple) else [value]
    return [part for each in values for part in (flag(name), str(each))]


class RunningProcess(Protocol):
    """A started process."""

    @property
    def url(self) -> str:
        """The URL at which the process listens."""
        ...

    async def wait(self) -> int:
        """Wait until the process ends. Return its exit code, or minus the number of the signal that ended it."""
        ...

    async def stop(self) -> None:
        """Send SIGTERM, after which the process drains and ends."""
        ...

    async def kill(self) -> None:
        """Send SIGKILL."""
        ...

    async def log(self, lines: int) -> str:
        """Return the last lines of the process's log."""
        ...


class Launcher(Protocol):
    """A way to start processes: on this machine, or on Ray's nodes."""

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a process. Raises LaunchError if that cannot be done."""
        ...

    async def release(self, name: str) -> None:
        """Free the resources of a process that will not be started again."""
        ...

    async def close(self) -> None:
        """Close the launcher after all its processes have ended."""
        ...


class LaunchError(Exception):
    """The error of a process that could not be started."""
