"""The ring, put together: four actors around one device, the api beside them, and a ledger over all."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from actors.actor import Actor, Address, Send
from actors.cache import Cache
from actors.device import Device, DeviceThread
from actors.forward import Forward
from actors.lease import Ledger, Move, Place, Violation
from actors.messages import Ran
from actors.pages import Pages
from actors.plan import Limits
from actors.result_processor import ResultProcessor, Vocabulary
from actors.runtime import Runtime
from actors.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """slots of the state pool, and pages of the KV pool (0 without attention)."""

    slots: int
    pages: int
    limits: Limits
    codec_check: bool = False


class DeviceFailed(Exception):
    """The device raised outside of any one request's step."""


class Relay:
    """To be made inside the event loop that is to carry it.

    device: given the delivery of results (called from the device's thread), makes the device.
    api: given its way to send, makes the api's actor.
    """

    def __init__(
        self,
        config: RelayConfig,
        device: Callable[[Callable[[Ran], None]], Device],
        vocabulary: Vocabulary,
        api: Callable[[Send], Actor],
        on_move: Callable[[Move], None] | None = None,
        on_violation: Callable[[Violation], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._device_failed: asyncio.Future[BaseException] = self._loop.create_future()
        self.ledger = Ledger(config.slots, on_move, on_violation)
        self.runtime = Runtime(self.ledger, config.codec_check)
        self.device = DeviceThread(device(self._deliver), self._fail)
        limits = config.limits
        pages = Pages(config.pages, max(limits.page_size, 1))
        sender = self.runtime.sender
        self.cache = Cache(sender("cache"), self.ledger, pages)
        self.scheduler = Scheduler(sender("scheduler"), limits)
        self.forward = Forward(sender("forward"), self.device, limits.max_running)
        self.results = ResultProcessor(sender("results"), vocabulary)
        for address, actor in self._unit().items():
            self.runtime.add(address, actor)
        self.runtime.add("api", api(sender("api")))

    def _unit(self) -> dict[Address, Actor]:
        return {"cache": self.cache, "scheduler": self.scheduler, "forward": self.forward, "results": self.results}

    async def run(self) -> None:
        """Carry the actors until cancelled; raises what an actor or the device raised."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.runtime.run)
                raise DeviceFailed("the device failed") from await self._device_failed
        finally:
            self.ledger.close()
            self.device.close()

    def audit(self) -> list[Violation]:
        """Every lease that an actor holds, against the ledger."""
        return self.ledger.audit({address: actor.leases() for address, actor in self._unit().items()})

    def counters(self) -> dict[str, int]:
        totals = self.cache.counters + self.scheduler.counters + self.results.counters
        return {**totals, "lease_violations": self.ledger.violations, "messages": self.runtime.delivered}

    def lease_moves(self) -> Counter[str]:
        return self.ledger.moves

    def gauges(self) -> dict[str, float | dict[str, int]]:
        """What there is now: requests running and waiting, slots by place, pages by use, mailbox depth by actor."""
        pages = self.cache.pages
        return {
            "running": len(self.scheduler.state.rows),
            "waiting": len(self.scheduler.state.queue),
            "slots": {str(place): self.ledger.counts[place] for place in Place},
            "pages": {"free": pages.free, "used": pages.used, "cached": pages.cached},
            "mailbox_depth": {address: len(box.messages) for address, box in self.runtime.mailboxes.items()},
        }

    def _deliver(self, ran: Ran) -> None:
        self._loop.call_soon_threadsafe(self.runtime.send, "device", "forward", ran)

    def _fail(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._device_failed.set_result, error)
