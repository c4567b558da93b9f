"""The supervisor of a cluster: it keeps the router and the engines running, and scales the groups of engines."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import structlog

from baton.api.cluster.file import ClusterFile
from baton.api.cluster.kept import KeptProcess
from baton.api.cluster.plan import ROUTER, engine_name, engine_spec, router_spec
from baton.api.cluster.processes import Launcher, ProcessSpec
from baton.api.cluster.router_client import RouterClient, RouterLostError, SeenEngine
from baton.api.cluster.scaling import GroupLoad, Scaler

LOOK_S = 0.5  # seconds between two queries of the router
HUNG_S = 30.0  # an engine is killed if its process runs, but the router has had no events from it for this long
TRIED_S = 5.0  # how long a restarted engine may go without a request before the next one is restarted
READY_S = 600.0  # how long an engine may take to be ready


class Supervisor:
    """A supervisor of the router and the engines. It adds engines to the router as they start, and removes them."""

    def __init__(
        self,
        cluster: ClusterFile,
        launcher: Launcher,
        local: Launcher,
        peers: Mapping[str, str],
        key: str,
        hung_after: float = HUNG_S,
    ) -> None:
        """launcher: starts the engines. local: starts the router, which runs on this machine.

        peers: the address at which each engine listens for other engines, by the engine's name
        key: the operator's API key; empty without keys
        hung_after: as HUNG_S
        """
        self._cluster, self._launcher, self._peers, self._hung_after = cluster, launcher, peers, hung_after
        self._client = RouterClient(key)
        self._scaler = Scaler(cluster.scaling)
        self._tasks = asyncio.TaskGroup()
        self._router = KeptProcess(ROUTER, self._router_spec, local)
        self._groups: dict[str, list[KeptProcess]] = {name: [] for name in cluster.engines}
        self._seen: dict[str, SeenEngine] = {}  # the router's engines, by URL
        self._heard: dict[str, int] = {}  # by engine: the value of `starts` for which the router has had events
        self._lost_since: dict[str, float] = {}  # by engine: when the router lost it
        self._stop = asyncio.Event()
        self._restart = asyncio.Lock()  # one restart at a time, so that only one engine is missing

    @property
    def members(self) -> list[KeptProcess]:
        return [self._router, *(member for group in self._groups.values() for member in group)]

    async def run(self) -> None:
        """Run the cluster until `stop` is called. Return when all its processes have ended."""
        async with self._tasks:
            for group, settings in self._cluster.engines.items():
                for _ in range(settings.least):
                    self._add(group)
            self._keep(self._router)
            watching = self._tasks.create_task(self._watch())
            await self._stop.wait()
            watching.cancel()
            await self._end()
        await self._client.close()

    def stop(self) -> None:
        self._stop.set()

    async def restart(self, names: list[str]) -> None:
        """Restart the named engines, or all engines if there are no names, one after another.

        Each answers requests again before the next one is restarted. The router is restarted last, if it is named.
        """
        chosen = [member for group in self._groups.values() for member in group if not names or member.name in names]
        async with self._restart:
            for member in chosen:
                if not member.stopping:
                    known = self._seen.get(member.url or "")
                    await member.restart()
                    await self._wait_ready(member, known.boot if known is not None else "")
            if self._router.name in names:
                await self._router.restart()

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each process, for `baton cluster status`."""
        return [self._status_of(member) for member in self.members]

    def _router_spec(self) -> ProcessSpec:
        urls = [member.address for group in self._groups.values() for member in group if member.address is not None]
        return router_spec(self._cluster, urls)

    def _add(self, group: str) -> None:
        """Start one more engine of a group."""
        number = len(self._groups[group])
        make_spec = partial(engine_spec, self._cluster, group, number, self._peers)
        member = KeptProcess(engine_name(group, number), make_spec, self._launcher)
        self._groups[group].append(member)
        self._keep(member)

    def _keep(self, member: KeptProcess) -> None:
        self._tasks.create_task(member.run())

    async def _remove(self, group: str) -> None:
        """Let the last engine of a group drain, and remove it from the group when it has ended."""
        member = self._groups[group][-1]
        await member.stop()
        self._groups[group].remove(member)

    async def _end(self) -> None:
        """Stop the router, then all engines. Each drains first."""
        await self._router.stop()
        await asyncio.gather(*(member.stop() for group in self._groups.values() for member in group))

    async def _watch(self) -> None:
        """Query the router at intervals. Update its engines, scale the groups, and kill hung engines."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except RouterLostError as error:
                structlog.get_logger().debug("the router does not answer", why=str(error))

    async def _look(self) -> None:
        if (router := self._router.url) is None:
            return
        engines = [member for group in self._groups.values() for member in group]
        # An engine that has ended and will be started again stays in the router, which remembers its sessions.
        urls = {member.address for member in engines if member.address is not None}
        seen = await self._client.engines(router)
        for url in urls - seen.keys():
            await self._client.add(router, url)
        for url in seen.keys() - urls:
            await self._client.remove(router, url)
        self._seen = seen
        await self._kill_hung(engines)
        for group in self._groups:
            await self._scale(group)

    async def _kill_hung(self, engines: list[KeptProcess]) -> None:
        """Kill each engine whose process runs, but which the router has lost for `hung_after` seconds.

        An engine of which the router has had no events since its start is left alone: it may still be loading.
        """
        now = asyncio.get_running_loop().time()
        for member in engines:
            known = self._seen.get(member.url or "")
            if known is not None and known.phase != "lost":
                self._heard[member.name] = member.starts
            if known is None or known.phase != "lost" or self._heard.get(member.name) != member.starts:
                self._lost_since.pop(member.name, None)
            elif now - self._lost_since.setdefault(member.name, now) > self._hung_after:
                structlog.get_logger().error("an engine hangs", process=member.name)
                del self._lost_since[member.name]
                await member.kill()

    async def _scale(self, group: str) -> None:
        """Add an engine to a group with long queues, or remove one from a group that needs fewer."""
        settings, members = self._cluster.engines[group], self._groups[group]
        seen = [self._seen[member.url] for member in members if member.url in self._seen]
        ready = [engine.load for engine in seen if engine.phase == "ready"]
        if len(ready) < len(members):
            return  # An engine is starting, draining or lost: its share of the load is not known.
        load = GroupLoad([each.queue_seconds for each in ready], [each.rows for each in ready])
        change = self._scaler.change(group, load, settings.least, settings.most, asyncio.get_running_loop().time())
        if change:
            log = structlog.get_logger()
            log.info("scaling", group=group, engines=len(members) + change, queue_seconds=load.mean_queue)
        if change > 0:
            self._add(group)
        elif change < 0:
            self._tasks.create_task(self._remove(group))

    async def _wait_ready(self, member: KeptProcess, boot: str) -> None:
        """Wait until a restarted engine is ready and the router has sent it a request, at most TRIED_S for the request.

        boot: the `boot` of the engine's run before the restart
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + READY_S
        ready_since: float | None = None
        while clock() < deadline and not member.stopping:
            await asyncio.sleep(LOOK_S / 5)
            known = self._seen.get(member.url or "")
            if known is None or known.phase != "ready" or known.boot == boot:
                ready_since = None
                continue
            ready_since = clock() if ready_since is None else ready_since
            if known.requests or known.role == "prefill" or clock() - ready_since > TRIED_S:
                return

    def _status_of(self, member: KeptProcess) -> dict[str, Any]:
        known = self._seen.get(member.url or "")
        running = "running" if member.url is not None else "waiting"
        phase = known.phase if known is not None else ("stopping" if member.stopping else running)
        load = known.load if known is not None else None
        return {
            "name": member.name,
            "phase": phase,
            "url": member.url,
            "restarts": member.restarts,
            "exit_code": member.exit_code,
            "rows": load.rows if load is not None else None,
            "queue_seconds": load.queue_seconds if load is not None else None,
        }
