"""The engines of a router: what each says of itself in its events, and which one a request belongs to."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import aiohttp
import msgspec
import structlog

from baton.api import errors
from baton.api.errors import ApiError
from baton.api.events.frames import Change, Load, Snapshot
from baton.api.routing.choice import UNMEASURED_S, Chosen, Demand, Engines
from baton.api.routing.index import StateIndex

SILENCE_S = 2.0  # an engine is left out after so long without an event; one is due every half second
RETRY_S = 0.25  # until a lost engine is asked again, twice as long each time
LONGEST_RETRY_S = 1.0
MOST_TAKEN_OVER = 10_000  # responses that engines have continued, the latest ones
MOST_EXPECTED = 10_000  # names of sessions that were just opened, the latest ones
EVENTS = msgspec.json.Decoder(Snapshot | Change)


@dataclass(eq=False, slots=True)
class EngineView:
    """An engine as its events describe it."""

    number: int
    url: str
    phase: str = "lost"  # "loading", "ready", "draining", or "lost": no events come
    why: str = "not connected yet"  # why it is lost
    name: str = ""
    model: str = ""
    role: str = ""
    boot: str = ""
    load: Load = field(default_factory=Load)
    sequence: int = 0  # of the last event
    names: set[str] = field(default_factory=set)  # of its sessions and responses
    requests: int = 0  # that were sent to it since it was found
    opened: int = 0  # sessions that were sent to it since the last event
    following: asyncio.Task[None] | None = None
    closing: set[Callable[[], object]] = field(default_factory=set)  # each ends the wait for an answer

    @contextmanager
    def unless_lost(self) -> Iterator[None]:
        """Wait for this engine in the block: if the engine is lost, the block ends with ConnectionError."""
        task, is_lost = asyncio.current_task(), False
        assert task is not None
        cancelled = task.cancelling()

        def cancel() -> None:
            nonlocal is_lost
            if not is_lost:
                is_lost = True
                task.cancel()

        if self.phase == "lost":
            raise ConnectionError(self.why)
        try:
            with self.closing_when_lost(cancel):
                yield
        except asyncio.CancelledError:
            if is_lost and task.uncancel() <= cancelled:
                raise ConnectionError("the engine is silent") from None
            raise

    @contextmanager
    def closing_when_lost(self, close: Callable[[], object]) -> Iterator[None]:
        """Call `close` if the engine is lost, so that its answer is not awaited for ever."""
        self.closing.add(close)
        try:
            yield
        finally:
            self.closing.discard(close)

    @property
    def takes_requests(self) -> bool:
        return self.phase == "ready" and self.role != "prefill"


class Fleet:
    """The engines of a router. Engines may join and leave at any time."""

    def __init__(self, headers: dict[str, str]) -> None:
        """headers: sent with the router's own requests to engines."""
        self.index = StateIndex()
        self.engines = Engines(self.index)
        self._views: dict[int, EngineView] = {}
        self._holders: dict[str, int] = {}  # the engine of each session and response, by name
        self._taken_over: OrderedDict[str, int] = OrderedDict()  # the engine that has continued a response, by name
        self._expected: OrderedDict[str, int] = OrderedDict()  # the engine where a session was opened, by name
        self._numbers = count()
        self._news = asyncio.Event()  # is set, and replaced, after each event
        self._headers = headers

    def __iter__(self) -> Iterator[EngineView]:
        return iter(self._views.values())

    def __getitem__(self, number: int) -> EngineView:
        return self._views[number]

    def add(self, url: str) -> EngineView:
        """Follow a further engine; return it, or the engine that has this URL already."""
        url = url.rstrip("/")
        known = next((view for view in self if view.url == url), None)
        if known is None:
            known = EngineView(next(self._numbers), url)
            self._views[known.number] = known
            known.following = asyncio.create_task(self._follow(known))
        return known

    async def remove(self, view: EngineView) -> None:
        """Forget an engine. Requests that it answers go on."""
        if view.following is not None:
            view.following.cancel()
            with suppress(asyncio.CancelledError):
                await view.following
        self.lose(view, "removed")
        self._drop(view, view.names)
        del self._views[view.number]

    async def close(self) -> None:
        for view in list(self):
            await self.remove(view)

    def holder(self, name: str) -> EngineView | None:
        """Return the engine that has a session or response, by its name (see `name_of`)."""
        number = self._taken_over.get(name, self._holders.get(name, self._expected.get(name)))
        return self._views.get(number) if number is not None else None

    def take_over(self, name: str, view: EngineView) -> None:
        """Note that an engine has continued a response, of which the engine that began it has only a part."""
        self._taken_over[name] = view.number
        if len(self._taken_over) > MOST_TAKEN_OVER:
            self._taken_over.popitem(last=False)

    def expect(self, name: str, view: EngineView) -> None:
        """Note that a session is opened at an engine, whose events will name it. Another of this name belongs there."""
        self._expected[name] = view.number
        if len(self._expected) > MOST_EXPECTED:
            self._expected.popitem(last=False)

    async def find(
        self, name: str, seconds: float, but: EngineView | None = None, lost: bool = True
    ) -> EngineView | None:
        """Return the engine that has a session or response. One that was just made may be in no event yet: wait for it.

        Return None if no event names it within so many seconds.

        but: an engine that is not meant
        lost: whether the engine may be lost
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    holder = self.holder(name)
                    if holder is not None and holder is not but and (lost or holder.phase != "lost"):
                        return holder
                    await self._news.wait()
        return None

    async def choose(self, demand: Demand, but: Iterable[int], seconds: float) -> Chosen | None:
        """Return the engine that would answer first; wait for one while none takes requests.

        Return None if there is none within so many seconds. but: engines that are left out, unless no other is found.
        """
        if (chosen := self.engines.choose(demand, but)) is not None:
            return chosen
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (chosen := self.engines.choose(demand)) is None:
                    await self._news.wait()
                return chosen
        return None

    def emptiest(self, but: Iterable[int] = ()) -> EngineView | None:
        """Return the engine for a new session, whose turns it will answer: the one with the fewest for its speed."""
        views = [view for view in self if view.takes_requests and view.number not in but]
        if not views:
            return None
        chosen = min(
            views, key=lambda view: (len(view.names) + view.opened + 1) * (view.load.token_seconds or UNMEASURED_S)
        )
        chosen.opened += 1
        return chosen

    def doubt(self, view: EngineView, why: str) -> None:
        """Choose an engine no more until its next event, because a request to it has failed. Others go on there."""
        structlog.get_logger().warning("engine in doubt", engine=view.name or view.url, why=why)
        self.engines.remove(view.number)

    def lose(self, view: EngineView, why: str) -> None:
        """Send no requests to an engine until its next snapshot, and forget what it has."""
        if view.phase != "lost":
            structlog.get_logger().warning("engine lost", engine=view.name or view.url, why=why)
        view.phase, view.why = "lost", why
        for close in list(view.closing):
            close()
        self.engines.remove(view.number)
        self.index.remove_all(view.number)

    def refusal(self) -> ApiError:
        """Return the 503 for a request that no engine takes."""
        phases = {view.phase for view in self}
        if "loading" in phases:
            return errors.loading()
        return errors.draining() if "draining" in phases else errors.unavailable("no engine is ready", "no_engine")

    async def _follow(self, view: EngineView) -> None:
        """Follow an engine's events, and connect again whenever they end."""
        wait = RETRY_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        while True:
            try:
                async with (
                    aiohttp.ClientSession(timeout=timeout, headers=self._headers) as http,
                    http.get(f"{view.url}/v1/events") as answer,
                ):
                    answer.raise_for_status()
                    async for event in events_of(answer.content):
                        self._take(view, event)
                        wait = RETRY_S
                self.lose(view, "its events ended")
            except Exception as error:
                self.lose(view, f"{type(error).__name__}: {error}".rstrip(": "))
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))
            wait = min(2 * wait, LONGEST_RETRY_S)

    def _take(self, view: EngineView, event: Snapshot | Change) -> None:
        """Take in an event. Raises ValueError if events are missing before it."""
        if isinstance(event, Snapshot):
            if view.phase == "lost":
                view.requests = 0
                view.name = self._name(view, event)
                structlog.get_logger().info("engine found", engine=view.name, url=view.url, phase=event.phase)
            self.index.remove_all(view.number)
            self._drop(view, view.names)
            if view.boot != event.boot:
                self._expected = OrderedDict(item for item in self._expected.items() if item[1] != view.number)
            view.model, view.role, view.boot = event.model, event.role, event.boot
        elif view.phase == "lost" or event.sequence != view.sequence + 1:
            raise ValueError(f"event {event.sequence} follows event {view.sequence}")
        else:
            self.index.remove(view.number, (int(digest, 16) for digest in event.gone))
            self._drop(view, set(event.names_gone))
        view.sequence, view.phase, view.load, view.why = event.sequence, event.phase, event.load, ""
        view.opened = 0
        self.index.add(view.number, (int(state.digest, 16) for state in event.states))
        for name in event.names:
            view.names.add(name)
            self._holders[name] = view.number
        self._news.set()
        self._news = asyncio.Event()
        load = event.load
        if view.takes_requests:
            seconds = load.queue_seconds, load.token_seconds, load.step_seconds
            self.engines.report(view.number, *seconds, load.rows, sum(load.slots.values()))
        else:
            self.engines.remove(view.number)

    def _name(self, view: EngineView, event: Snapshot) -> str:
        """Return a name that no other engine has: with its address if another has the name that it gives itself."""
        others = {other.name for other in self if other is not view}
        return event.name if event.name not in others else f"{event.name} ({view.url.partition('://')[2]})"

    def _drop(self, view: EngineView, names: set[str]) -> None:
        for name in list(names):
            view.names.discard(name)
            if self._holders.get(name) == view.number:
                del self._holders[name]


async def events_of(stream: aiohttp.StreamReader) -> AsyncIterator[Snapshot | Change]:
    """Yield the events of a stream of server-sent events. Raises msgspec.MsgspecError for others."""
    rest = b""
    async for chunk in stream.iter_any():
        *whole, rest = (rest + chunk).split(b"\n\n")
        for frame in whole:
            if frame.startswith(b"data: "):
                yield EVENTS.decode(frame[6:])
