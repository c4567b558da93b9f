"""The supervisor of a cluster: it keeps the router and the engines running, and their number right."""

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

LOOK_S = 0.5  # between looks at what the router says
HUNG_S = 30.0  # an engine that the router has lost for so long, though it runs, is killed
TRIED_S = 5.0  # how long a restarted engine may go without a request before the next one is restarted
READY_S = 600.0  # how long an engine may take to be ready


class Supervisor:
    """The processes of a cluster. Engines join and leave the router as they start and end."""

    def __init__(
        self,
        cluster: ClusterFile,
        launcher: Launcher,
        local: Launcher,
        peers: Mapping[str, str],
        key: str,
        hung_after: float = HUNG_S,
    ) -> None:
        """launcher: of the engines. local: of the router, which runs on this machine.

        peers: the engines' addresses for each other, by name
        key: API key for the router's administration; empty without keys
        hung_after: seconds after which an engine is killed that runs, but that the router has lost
        """
        self._cluster, self._launcher, self._peers, self._hung_after = cluster, launcher, peers, hung_after
        self._client = RouterClient(key)
        self._scaler = Scaler(cluster.scaling)
        self._tasks = asyncio.TaskGroup()
        self._router = KeptProcess(ROUTER, self._router_spec, local)
        self._groups: dict[str, list[KeptProcess]] = {name: [] for name in cluster.engines}
        self._seen: dict[str, SeenEngine] = {}  # the router's engines, by URL
        self._heard: dict[str, int] = {}  # the latest start of each engine that the router has heard of, by name
        self._lost_since: dict[str, float] = {}  # by name
        self._stop = asyncio.Event()
        self._restart = asyncio.Lock()  # two restarts at once would take two engines away

    @property
    def members(self) -> list[KeptProcess]:
        return [self._router, *(member for group in self._groups.values() for member in group)]

    async def run(self) -> None:
        """Run the cluster until `stop` is called and all its processes have ended."""
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
        """Restart engines, or all without names, one by one: the next when the last one answers requests again."""
        chosen = [member for group in self._groups.values() for member in group if not names or member.name in names]
        async with self._restart:
            for member in chosen:
                if not member.stopping:
                    known = self._seen.get(member.url or "")
                    await member.restart()
                    await self._until_it_answers(member, known.boot if known is not None else "")
            if self._router.name in names:
                await self._router.restart()

    def status(self) -> list[dict[str, Any]]:
        """Return what is known of each process."""
        return [self._status_of(member) for member in self.members]

    def _router_spec(self) -> ProcessSpec:
        urls = [member.address for group in self._groups.values() for member in group if member.address is not None]
        return router_spec(self._cluster, urls)

    def _add(self, group: str) -> None:
        """Start a further engine of a group."""
        number = len(self._groups[group])
        make_spec = partial(engine_spec, self._cluster, group, number, self._peers)
        member = KeptProcess(engine_name(group, number), make_spec, self._launcher)
        self._groups[group].append(member)
        self._keep(member)

    def _keep(self, member: KeptProcess) -> None:
        self._tasks.create_task(member.run())

    async def _remove(self, group: str) -> None:
        """Let the last engine of a group drain and end."""
        member = self._groups[group][-1]
        await member.stop()
        self._groups[group].remove(member)

    async def _end(self) -> None:
        """Let the router drain, then the engines."""
        await self._router.stop()
        await asyncio.gather(*(member.stop() for group in self._groups.values() for member in group))

    async def _watch(self) -> None:
        """Look at the router again and again: add and remove engines, scale groups, and kill engines that hang."""
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
        urls = {member.address for member in engines if member.address is not None}  # the router knows what they had
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
        """Kill engines that run, were heard of since they started, and have not been heard of for long."""
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
        """Add or remove an engine of a group, if its queues have been long, or it has been idle, for long enough."""
        settings, members = self._cluster.engines[group], self._groups[group]
        seen = [self._seen[member.url] for member in members if member.url in self._seen]
        ready = [engine.load for engine in seen if engine.phase == "ready"]
        if len(ready) < len(members):
            return
        load = GroupLoad([each.queue_seconds for each in ready], [each.rows for each in ready])
        change = self._scaler.change(group, load, settings.least, settings.most, asyncio.get_running_loop().time())
        if change:
            log = structlog.get_logger()
            log.info("scaling", group=group, engines=len(members) + change, queue_seconds=load.mean_queue)
        if change > 0:
            self._add(group)
        elif change < 0:
            self._tasks.create_task(self._remove(group))

    async def _until_it_answers(self, member: KeptProcess, boot: str) -> None:
        """Wait until a restarted engine is ready, and has been sent a request unless none comes.

        boot: what the router calls the run that has ended
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
