"""The processes that a cluster's file describes: their names, options and addresses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.api.cluster.file import ClusterFile
from baton.api.cluster.processes import ProcessSpec

ROUTER = "router"
KEYS = ("api_key", "api_key_file")


def engine_name(group: str, number: int) -> str:
    return f"{group}-{number}"


def engine_spec(cluster: ClusterFile, group: str, number: int, peers: Mapping[str, str]) -> ProcessSpec:
    """Return the process of engine `number` of a group.

    peers: from `peer_addresses`. Each engine connects to the engines that are listed before it.
    """
    own, name = cluster.engines[group], engine_name(group, number)
    options: dict[str, Any] = {"engine_name": name, **cluster.options, **own.options}
    if own.port is not None:
        options["port"] = own.port + number
    if peers:
        names = list(peers)
        options["peer_listen"] = peers[name]
        options["peer"] = [peers[earlier] for earlier in names[: names.index(name)]]
        if (successor := successor_of(cluster, group, number)) is not None:
            options["drain_to"] = successor
    return ProcessSpec(
        name, "serve", options, cluster.model, own.variables, own.cpus, own.gpus, own.resources,
    )  # fmt: skip


def successor_of(cluster: ClusterFile, group: str, number: int) -> str | None:
    """Return the engine of the group that takes over sessions and states when engine `number` leaves; None: no engine.

    It is the engine before, which runs as long as this one, because the last engine of a group is removed first. For
    the first engine it is the second, if the group always has two.
    """
    if number:
        return engine_name(group, number - 1)
    return engine_name(group, 1) if cluster.engines[group].least > 1 else None


def peer_addresses(cluster: ClusterFile, folder: Path) -> dict[str, str]:
    """Return the address of each engine that may run, by name, prefill engines first; {} if engines are not linked.

    folder: folder of the engines' sockets, relative to their working directory.
    """
    groups = sorted(cluster.engines, key=lambda name: role_of(cluster, name) != "prefill")
    names = [engine_name(group, number) for group in groups for number in range(cluster.engines[group].most)]
    return {name: f"unix:{folder / name}" for name in names} if cluster.linked and len(names) > 1 else {}


def role_of(cluster: ClusterFile, group: str) -> str:
    return str((cluster.options | cluster.engines[group].options).get("role", "both"))


def router_spec(cluster: ClusterFile, engines: Sequence[str]) -> ProcessSpec:
    """Return the router's process. engines: URLs of the running engines."""
    return ProcessSpec(ROUTER, "route", {**shared_keys(cluster), **cluster.router, "engine": engines})


def shared_keys(cluster: ClusterFile) -> dict[str, Any]:
    """Return the options for API keys that all engines share, which the router needs too."""
    return {name: cluster.options[name] for name in KEYS if name in cluster.options}
