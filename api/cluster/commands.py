"""`baton cluster`: the commands that start, show, restart and stop a cluster."""

import asyncio
import os
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog

from baton.api.cluster.control import ControlError, ask, listening
from baton.api.cluster.file import ClusterFile, read_cluster
from baton.api.cluster.local import LocalLauncher
from baton.api.cluster.plan import KEYS, peer_addresses, shared_keys
from baton.api.cluster.processes import Launcher
from baton.api.cluster.supervisor import Supervisor
from baton.api.config import Config, ConfigError, load
from baton.api.hub.names import hub_name
from baton.api.machine.signals import Signals
from baton.api.security import accepted_keys
from baton.api.telemetry import logs
from baton.api.terminal.console import complain

COLUMNS = ("name", "phase", "url", "rows", "queue_seconds", "restarts")


def run(options: dict[str, Any], signals: Signals) -> int:
    """Run a command and return its exit code."""
    try:
        cluster = in_folder(read_cluster(options["file"]), options["file"].parent)
        if options["verb"] == "up":
            logs.configure("auto", "info")
            return anyio.run(up, cluster, options["file"], signals)
        return asyncio.run(command(options))
    except (ConfigError, ControlError) as error:
        complain(error)
        return 2


def in_folder(cluster: ClusterFile, folder: Path) -> ClusterFile:
    """Return the cluster with an absolute path of its model, which the file gives relative to its own folder.

    A model that is named on the hub, and is no such folder, stays as it is.
    """
    if cluster.model is None or (hub_name(cluster.model) is not None and not (folder / cluster.model).exists()):
        return cluster
    # Do not resolve links: in the hub's cache a GGUF file is a link to a blob, whose name has no suffix.
    return msgspec.structs.replace(cluster, model=os.path.abspath(folder / cluster.model))


def folder_of(file: Path) -> Path:
    """Return the folder of a cluster's sockets and logs."""
    return file.with_suffix(".run")


def socket_of(file: Path) -> Path:
    return folder_of(file) / "control"


async def up(cluster: ClusterFile, file: Path, signals: Signals) -> int:
    """Run a cluster until a signal or `down`. Raises ControlError if it runs already, ConfigError for wrong options."""
    folder = folder_of(file)
    (folder / "peers").mkdir(mode=0o700, parents=True, exist_ok=True)
    loop, where = asyncio.get_running_loop(), file.parent
    local = LocalLauncher(where, folder / "logs")
    launcher = local if cluster.launcher == "local" else await asyncio.to_thread(on_ray, cluster)
    peers = peer_addresses(cluster, (folder / "peers").relative_to(where))
    supervisor = Supervisor(cluster, launcher, local, peers, operator_key(cluster, where))
    signals.deliver_on(loop, supervisor.stop)
    signals.take()  # Install the handlers again: Ray has replaced them.
    async with listening(supervisor, socket_of(file)):
        log = structlog.get_logger()
        log.info("cluster", file=str(file), logs=str(folder / "logs"))
        await supervisor.run()
    await launcher.close()
    return 0


def on_ray(cluster: ClusterFile) -> Launcher:
    from baton.api.cluster.on_ray import RayLauncher

    return RayLauncher(cluster.ray)


def operator_key(cluster: ClusterFile, folder: Path) -> str:
    """Return the operator's key, which is the first API key; empty without keys. Raises ConfigError."""
    options = shared_keys(cluster) | {name: cluster.router[name] for name in KEYS if name in cluster.router}
    if "api_key_file" in options:
        options["api_key_file"] = str(folder / options["api_key_file"])
    config: Config = load(options, {})
    keys = accepted_keys(config)
    return keys[0] if keys else ""


async def command(options: dict[str, Any]) -> int:
    """Send a command to the cluster's supervisor, and print its answer. Raises ControlError."""
    socket = socket_of(options["file"])
    match options["verb"]:
        case "status":
            print(table(await ask(socket, "GET", "status")))
        case "logs":
            query = {"name": options["names"]} if options["names"] else {}
            for name, text in (await ask(socket, "GET", "logs", lines=options["lines"], **query)).items():
                print(f"==> {name} <==\n{text}")
        case "restart":
            await ask(socket, "POST", "restart", options["names"])
        case "down":
            await ask(socket, "POST", "down")
            while socket.exists():  # noqa: ASYNC110 (a file has no event to wait for)
                await asyncio.sleep(0.1)
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as lines of aligned columns."""
    cells = [COLUMNS, *(tuple(shown(row[name]) for name in COLUMNS) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
