"""The processes of a cluster, and the launchers that start them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.api.config import flag


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process of a cluster, as it is to be started."""

    name: str
    command: str  # "serve" or "route"
    options: Mapping[str, Any]  # of the command; without a port any free one is used
    model: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def arguments(self, host: str, port: int) -> list[str]:
        """Return the arguments of Python that run the command with these defaults of `host` and `port`."""
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
    """Return an option as it is given on the command line."""
    if isinstance(value, bool):
        return [flag(name)] if value else []
    values = value if isinstance(value, list | tuple) else [value]
    return [part for each in values for part in (flag(name), str(each))]


class RunningProcess(Protocol):
    """A started process."""

    @property
    def url(self) -> str:
        """Where it listens."""
        ...

    async def wait(self) -> int:
        """Wait for its end; return the exit code, which is negative for a signal."""
        ...

    async def stop(self) -> None:
        """Send SIGTERM, after which it drains and ends."""
        ...

    async def kill(self) -> None:
        """Send SIGKILL."""
        ...

    async def log(self, lines: int) -> str:
        """Return the last lines of its log."""
        ...


class Launcher(Protocol):
    """A way to run processes."""

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a process. Raises LaunchError if that cannot be done."""
        ...

    async def release(self, name: str) -> None:
        """Give back what a process held, after it has ended for good."""
        ...

    async def close(self) -> None:
        """Close the connection to what runs processes, after all of them have ended."""
        ...


class LaunchError(Exception):
    """A process could not be started."""
