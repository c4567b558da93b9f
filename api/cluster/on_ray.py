"""The launcher of processes on the nodes of a Ray cluster.

Each process is the child of a Ray actor. Ray places the actor and its resources, and restarts it. Ray sees neither
requests nor states: engines talk to the router and to each other directly.
"""

import asyncio
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.api.cluster.local import LocalLauncher, LocalProcess, free_port
from baton.api.cluster.processes import LaunchError, ProcessSpec
from baton.api.config import ConfigError

NAMESPACE = "baton"
LOST = -9  # the exit code of a process whose actor or node has died
START_S = 60.0  # how long an actor may take to start its process after Ray has placed it


class ProcessActor:
    """A Ray actor that runs one process on its node. If the actor dies, the kernel sends SIGTERM to the process."""

    def __init__(self) -> None:
        from ray.util import get_node_ip_address

        self._host = str(get_node_ip_address())
        self._folder = Path(tempfile.mkdtemp(prefix="baton-"))
        self._launcher = LocalLauncher(Path.cwd(), self._folder, self._host)
        self._process: LocalProcess | None = None

    async def host(self) -> str:
        """Return the address of this node."""
        return self._host

    async def free_port(self) -> int:
        return free_port(self._host)

    async def start(self, spec: ProcessSpec, key: str) -> str:
        """Start the process, and return its URL. key: content of --peer-key-file; empty: the option is not set."""
        if key:
            path = self._folder / "key"
            path.touch(mode=0o600)
            path.write_text(key)
            spec = replace(spec, options={**spec.options, "peer_key_file": str(path)})
        self._process = await self._launcher.start(spec)
        return self._process.url

    async def wait(self) -> int:
        return await self._process.wait() if self._process is not None else LOST

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.kill()

    async def log(self, lines: int) -> str:
        return await self._process.log(lines) if self._process is not None else ""


class RayProcess:
    """A process on a Ray node, reached through its actor."""

    def __init__(self, actor: Any, url: str) -> None:
        self._actor, self._url = actor, url

    @property
    def url(self) -> str:
        return self._url

    async def wait(self) -> int:
        from ray.exceptions import RayError

        try:
            return int(await self._actor.wait.remote())
        except RayError:
            return LOST

    async def stop(self) -> None:
        await self._call("stop")

    async def kill(self) -> None:
        await self._call("kill")

    async def log(self, lines: int) -> str:
        return str(await self._call("log", lines) or "")

    async def _call(self, method: str, *arguments: object) -> object:
        """Call the actor. Return None if it has died."""
        from ray.exceptions import RayError

        with suppress(RayError):
            return await getattr(self._actor, method).remote(*arguments)
        return None


class RayLauncher:
    """A launcher that starts each process as the child of a Ray actor, in a placement group with its resources."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Connect to Ray. arguments: of ray.init. Raises ConfigError if Ray is not installed or cannot be reached."""
        try:
            import ray
        except ImportError:
            raise ConfigError("launcher = \"ray\" needs Ray: pip install 'baton-serve[cluster]'") from None
        self._ray = ray
        try:
            ray.init(**{"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "WARNING"} | dict(arguments))
        except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"ray.init: {error}") from None
        self._key = secrets.token_hex(16)
        self._actors: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        self._peers: dict[str, str] = {}  # by engine, in order of their start: the address for its peers
        self._ports: dict[str, int] = {}  # by engine: the port of that address, kept over restarts

    async def start(self, spec: ProcessSpec) -> RayProcess:
        from ray.exceptions import RayError

        try:
            actor = await self._place(spec)
            async with asyncio.timeout(START_S):
                linked = await self._linked(spec, actor)
                url = await actor.start.remote(linked, self._key if "peer_listen" in linked.options else "")
        except (RayError, TimeoutError) as error:
            raise LaunchError(f"Ray: {type(error).__name__}: {error}".partition("\n")[0]) from None
        return RayProcess(actor, url)

    async def release(self, name: str) -> None:
        from ray.util import remove_placement_group

        if (actor := self._actors.pop(name, None)) is not None:
            self._ray.kill(actor, no_restart=True)
        if (group := self._groups.pop(name, None)) is not None:
            remove_placement_group(group)
        self._peers.pop(name, None)

    async def close(self) -> None:
        await asyncio.to_thread(self._ray.shutdown)

    async def _place(self, spec: ProcessSpec) -> Any:
        """Return the process's actor, which all its starts share. Create it if there is none: wait for resources."""
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if spec.name not in self._actors:
            needs = {"CPU": spec.cpus, "GPU": float(spec.gpus), **spec.resources}
            if spec.name not in self._groups:
                self._groups[spec.name] = placement_group([{name: count for name, count in needs.items() if count}])
            group = self._groups[spec.name]
            await group.ready()
            self._actors[spec.name] = self._ray.remote(ProcessActor).options(
                num_cpus=spec.cpus,
                num_gpus=spec.gpus,
                resources=dict(spec.resources),
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            ).remote()  # fmt: skip
        return self._actors[spec.name]

    async def _linked(self, spec: ProcessSpec, actor: Any) -> ProcessSpec:
        """Add the addresses of links to the options: the engine connects to the engines that were placed before it."""
        options = dict(spec.options)
        if "peer_listen" in options:
            if spec.name not in self._ports:
                self._ports[spec.name] = await actor.free_port.remote()
            host = await actor.host.remote()
            self._peers[spec.name] = options["peer_listen"] = f"{host}:{self._ports[spec.name]}"
            names = list(self._peers)
            options["peer"] = [self._peers[name] for name in names[: names.index(spec.name)]]
        return replace(spec, options=options, gpus=0)  # Ray sets the variable with its GPUs
