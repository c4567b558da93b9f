"""A whole ring around a small model, in this process, for tests that inspect its actors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.actors.actor import Send
from baton.actors.cache.actor import Cache
from baton.actors.cache.below.limits import NO_TIERS, TierLimits
from baton.actors.cache.pages import PagePool
from baton.actors.cache.worth.order import Policy
from baton.actors.forward.contained import ContainedDevice
from baton.actors.forward.launching import Device
from baton.actors.forward.torch_device import TorchDevice, survives
from baton.actors.lease import Lease, Ledger
from baton.actors.messages import (
    Abort,
    Delta,
    Drain,
    Drained,
    Ended,
    Flush,
    Flushed,
    Kept,
    Message,
    Name,
    Restarted,
    Submit,
    Suspend,
    Suspended,
    Unname,
)
from baton.actors.requests import Request, Sampling, Stops, TokenLogprob, resubmission
from baton.actors.results.interfaces import Draft, no_drafts
from baton.actors.runtime.events import Event
from baton.actors.runtime.relay import Relay, RelayConfig
from baton.actors.scheduler.plan import Limits
from baton.actors.storage.files import StateFiles
from baton.actors.storage.host_memory import HostStates
from baton.actors.tokens import pack, unpack
from baton.models.batch import Model, Pools, allocate
from baton.models.text.detokenizer import Detokenizer

GREEDY = Sampling(temperature=0.0)


@dataclass
class Answer:
    """A request, and everything that the api received for it."""

    request: Request
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    matched: int = 0
    lost: str = ""
    origin: str = ""
    end: str | None = None
    reason: str | int | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompt(self) -> list[int]:
        return unpack(self.request.tokens)


class Letters:
    """A vocabulary in which token i is a letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("0") + i) for i in ids)

    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self.decode, prompt_tail)


class Ring:
    """The api's actor of a test ring, with methods that send messages and wait for answers."""

    def __init__(self, model: Model, pools: Pools) -> None:
        self.model, self.pools = model, pools
        self.answers: dict[str, Answer] = {}
        self.drained: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self.flushed = asyncio.Event()
        self.kept: dict[str, tuple[str, int]] = {}
        self.suspended: list[Suspended] = []
        self._heard = asyncio.Event()
        self.relay: Relay
        self.carrying: asyncio.Task[None]
        self._send: Send

    def bind(self, send: Send) -> "Ring":
        self._send = send
        return self

    def receive(self, message: Message) -> None:
        self._heard.set()
        match message:
            case Delta(outputs):
                for output in outputs:
                    answer = self.answers[output.request]
                    assert not answer.done.is_set(), f"{output.request} was answered after its end"
                    answer.text += output.text
                    answer.tokens += unpack(output.tokens)
                    answer.logprobs += output.logprobs
                    answer.prompt_logprobs += output.prompt_logprobs
                    assert output.completion_tokens == len(answer.tokens)
                    answer.cached, answer.matched = output.hit.cached_tokens, output.hit.matched_tokens
                    answer.miss_reason, answer.reason = output.hit.miss_reason, output.stop_reason
                    answer.origin = output.hit.origin
                    self._end(output.request, output.finish_reason)
            case Ended(request, reason):
                self._end(request, reason)
            case Restarted():
                for answer in self.answers.values():
                    if not answer.done.is_set():
                        again = resubmission(answer.request, pack(answer.tokens), len(answer.text))
                        self._send("scheduler", Submit(again, resubmitted=True))
            case Flushed():
                self.flushed.set()
            case Kept(session, tier, position):
                self.kept[session] = tier, position
            case Suspended():
                self.suspended.append(message)
            case Drained(astray):
                self.drained.set_result(astray)
            case _:
                raise TypeError(f"unexpected {message!r}")

    def act(self) -> None:
        pass

    def leases(self) -> list[Lease]:
        return []

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        sampling: Sampling = GREEDY,
        stops: Stops | None = None,
        **more: object,
    ) -> Answer:
        name = f"r{len(self.answers)}"
        request = Request(name, pack(prompt), len(prompt), sampling, stops or Stops(max_tokens), **more)
        self.answers[name] = Answer(request)
        self._send("scheduler", Submit(request))
        return self.answers[name]

    async def ask(self, prompt: list[int], max_tokens: int = 8, **more: object) -> Answer:
        answer = self.submit(prompt, max_tokens, **more)
        await asyncio.wait_for(answer.done.wait(), 60)
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true; test it after each message to the api."""
        async with asyncio.timeout(60):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    def abort(self, name: str) -> None:
        self._send("scheduler", Abort(name))

    def name(self, session: str, tokens: list[int]) -> None:
        self._send("cache", Name(session, "", pack(tokens)))

    def unname(self, session: str) -> None:
        self._send("cache", Unname(session))

    async def turn(self, session: str, prompt: list[int], max_tokens: int = 8) -> Answer:
        """Run one turn of a session, and wait until the cache has saved its state."""
        if session not in self.kept:
            self.name(session, [])
        answer = await self.ask(prompt, max_tokens, session=session)
        await self.until(lambda: not self.relay.unit.cache.accounts)
        return answer

    async def suspend(self, session: str) -> Suspended:
        answered = len(self.suspended)
        self._send("cache", Suspend(answered, session))
        await self.until(lambda: len(self.suspended) > answered)
        return self.suspended[-1]

    async def flush(self) -> None:
        self.flushed.clear()
        self._send("cache", Flush(1))
        await asyncio.wait_for(self.flushed.wait(), 10)

    def _end(self, request: str, reason: str | None) -> None:
        if reason is not None:
            self.answers[request].end = reason
            self.answers[request].done.set()


@asynccontextmanager
async def running(
    model: Model,
    slots: int = 16,
    pages: int = 64,
    page_size: int = 16,
    codec_check: bool = False,
    poison_freed: bool = False,
    restarts: int = 0,
    wrap: Callable[[TorchDevice], Device] = lambda device: device,
    tiers: TierLimits = NO_TIERS,
    folder: Path | None = None,
    record: Callable[[Event], None] | None = None,
    policy: Policy = "worth",
    cache: Callable[[Send, Ledger, PagePool], Cache] | None = None,
    draft: Draft = no_drafts,
    **limits: object,
) -> AsyncIterator[Ring]:
    """Run a ring, and drain and audit it at the end. Raises the error that ended the ring early, if there is one."""
    pages = pages if model.kv_specs() else 0
    chosen = Limits(**{"page_size": page_size if pages else 0, **limits})
    pools = allocate(model, slots, pages, page_size, torch.device("cpu"), chosen.max_running, chosen.drafts)
    ring = Ring(model, pools)
    host = HostStates()
    torch_device = TorchDevice(model, pools, chosen.max_running, 1024, host)
    device = ContainedDevice(wrap(torch_device), survives)
    config = RelayConfig(slots, pages, chosen, tiers, codec_check, poison_freed, restarts, cache_policy=policy)
    disk = StateFiles(folder, "this model", host) if folder is not None else None
    if disk is not None:
        disk.scan()
    ring.relay = Relay(config, device, Letters(), ring.bind, disk=disk, on_event=record, cache=cache, draft=draft)
    carrying = ring.carrying = asyncio.create_task(ring.relay.run())
    try:
        yield ring
        ring._send("scheduler", Drain())
        await asyncio.wait({asyncio.ensure_future(ring.drained), carrying}, timeout=30, return_when="FIRST_COMPLETED")
        if carrying.done():
            carrying.result()
        assert ring.drained.result() == []
        assert ring.relay.audit() == []
        assert ring.relay.ledger.violations == 0
    finally:
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)
