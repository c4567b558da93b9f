"""The engines of a router: the state that each reports in its events, and which engine has which session."""

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

SILENCE_S = 2.0  # an engine is lost after this long without an event; one is due every half second
RETRY_S = 0.25  # until the router connects to a lost engine again; doubles each time
LONGEST_RETRY_S = 1.0
MOST_TAKEN_OVER = 10_000  # most responses of `Fleet.take_over` that are remembered
MOST_EXPECTED = 10_000  # most names of `Fleet.expect` that are remembered
EVENTS = msgspec.json.Decoder(Snapshot | Change)


@dataclass(eq=False, slots=True)
class EngineView:
    """The state of an engine according to its events."""

    number: int
    url: str
    phase: str = "lost"  # "loading", "ready", "draining", "removed", or "lost": the router gets no events
    why: str = "not connected yet"  # why it is lost
    name: str = ""
    model: str = ""
    role: str = ""
    boot: str = ""
    load: Load = field(default_factory=Load)
    sequence: int = 0  # number of the last event
    names: set[str] = field(default_factory=set)  # names of its sessions and responses (`name_of`)
    requests: int = 0  # requests that were sent to it since it was last found
    opened: int = 0  # new sessions that were sent to it since its last event
    following: asyncio.Task[None] | None = None  # reads its events
    closing: set[Callable[[], object]] = field(default_factory=set)  # called when it is lost; empty while it is idle
    leaving: set[Callable[[], object]] = field(default_factory=set)  # called when the engine is removed

    @contextmanager
    def unless_lost(self) -> Iterator[None]:
        """End the block with ConnectionError if the engine is lost, so that no answer is awaited for ever."""
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
        """Call `close` if the engine gets lost during the block. A removed engine is followed until the block ends."""
        self.closing.add(close)
        try:
            yield
        finally:
            self.closing.discard(close)

    @contextmanager
    def leaving_when_removed(self, leave: Callable[[], object]) -> Iterator[None]:
        """Call `leave` if the engine is removed during the block."""
        self.leaving.add(leave)
        try:
            yield
        finally:
            self.leaving.discard(leave)

    @property
    def takes_requests(self) -> bool:
        return self.phase == "ready" and self.role != "prefill"


class Fleet:
    """The engines of a router. Engines may join and leave at any time."""

    def __init__(self, headers: dict[str, str]) -> None:
        """headers: headers of the router's own requests to engines."""
        self.index = StateIndex()
        self.engines = Engines(self.index)
        self._views: dict[int, EngineView] = {}
        self._removed = set[EngineView]()  # removed engines that are still followed
        self._holders: dict[str, int] = {}  # by name: the engine that has the session or response
        self._taken_over: OrderedDict[str, int] = OrderedDict()  # by name: the engine that has continued the response
        self._expected: OrderedDict[str, int] = OrderedDict()  # by name: the engine that was asked to open the session
        self._numbers = count()
        self._news = asyncio.Event()  # set, and then replaced by a new one, after each event
        self._headers = headers

    def __iter__(self) -> Iterator[EngineView]:
        return iter(self._views.values())

    def __contains__(self, view: EngineView) -> bool:
        return view.number in self._views

    def __getitem__(self, number: int) -> EngineView:
        return self._views[number]

    def add(self, url: str) -> EngineView:
        """Add an engine and follow its events. Return it, or the engine that already has this URL."""
        url = url.rstrip("/")
        known = next((view for view in self if view.url == url), None)
        if known is None:
            known = EngineView(next(self._numbers), url)
            self._views[known.number] = known
            known.following = asyncio.create_task(self._follow(known))
        return known

    def remove(self, view: EngineView) -> None:
        """Remove an engine. It gets no new requests, and those that it is answering go on.

        Its events are read until these have ended: if it is lost before, they end as for any lost engine.
        """
        structlog.get_logger().info("engine removed", engine=view.name or view.url)
        del self._views[view.number]
        self.engines.remove(view.number)
        self.index.remove_all(view.number)
        self._drop(view, view.names)
        if view.phase != "lost":
            view.phase = "removed"
        for leave in list(view.leaving):
            leave()
        if view.following is not None:
            self._removed.add(view)
            view.following.add_done_callback(lambda _: self._removed.discard(view))
            if not view.closing:
                view.following.cancel()

    async def close(self) -> None:
        """Stop following the engines."""
        tasks = [view.following for view in (*self, *self._removed) if view.following is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def holder(self, name: str) -> EngineView | None:
        """Return the engine that has a session or response, by its name (see `name_of`)."""
        numbers = (self._taken_over, self._holders, self._expected)
        views = (self._views.get(each[name]) for each in numbers if name in each)
        return next((view for view in views if view is not None), None)  # Others have been removed.

    def take_over(self, name: str, view: EngineView) -> None:
        """Note that an engine continues another one's response: requests for the response go to this engine."""
        self._taken_over[name] = view.number
        if len(self._taken_over) > MOST_TAKEN_OVER:
            self._taken_over.popitem(last=False)

    def expect(self, name: str, view: EngineView) -> None:
        """Note that an engine is asked to open a session: until events name the session, requests for it go there."""
        self._expected[name] = view.number
        if len(self._expected) > MOST_EXPECTED:
            self._expected.popitem(last=False)

    async def find(
        self, name: str, seconds: float, but: EngineView | None = None, lost: bool = True
    ) -> EngineView | None:
        """Return the engine that has a session or response; None if no event names it within `seconds`.

        A session or response that was just made may not be in any event yet, so wait for it.

        but: an engine that may not be returned
        lost: whether a lost engine may be returned
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
        """Return the engine that would answer first; None if no engine takes requests within `seconds`.

        but: engines that are chosen only if no other engine takes requests
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
        """Return the engine for a new session: the one with the fewest sessions and responses for its speed."""
        views = [view for view in self if view.takes_requests and view.number not in but]
        if not views:
            return None
        chosen = min(
            views, key=lambda view: (len(view.names) + view.opened + 1) * (view.load.token_seconds or UNMEASURED_S)
        )
        chosen.opened += 1
        return chosen

    def doubt(self, view: EngineView, why: str) -> None:
        """Do not choose an engine until its next event, because a request to it failed. Its other requests continue."""
        structlog.get_logger().warning("engine in doubt", engine=view.name or view.url, why=why)
        self.engines.remove(view.number)

    def lose(self, view: EngineView, why: str) -> None:
        """Send no requests to an engine until its next snapshot, and forget its states."""
        if view.phase != "lost":
            structlog.get_logger().warning("engine lost", engine=view.name or view.url, why=why)
        view.phase, view.why = "lost", why
        for close in list(view.closing):
            close()
        self.engines.remove(view.number)
        self.index.remove_all(view.number)

    def refusal(self) -> ApiError:
        """Return the ApiError 503 for a request that no engine can take."""
        phases = {view.phase for view in self}
        if "loading" in phases:
            return errors.loading()
        return errors.draining() if "draining" in phases else errors.unavailable("no engine is ready", "no_engine")

    async def _follow(self, view: EngineView) -> None:
        """Read an engine's events, and connect again whenever they end. End after its removal and its last request."""
        wait = RETRY_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        while view in self or view.closing:
            try:
                async with (
                    aiohttp.ClientSession(timeout=timeout, headers=self._headers) as http,
                    http.get(f"{view.url}/v1/events") as answer,
                ):
                    answer.raise_for_status()
                    async for event in events_of(answer.content):
                        if view in self:
                            self._take(view, event)
                        elif not view.closing:
                            return
                        wait = RETRY_S
                self.lose(view, "its events ended")
            except Exception as error:
                self.lose(view, f"{type(error).__name__}: {error}".rstrip(": "))
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))
            wait = min(2 * wait, LONGEST_RETRY_S)

    def _take(self, view: EngineView, event: Snapshot | Change) -> None:
        """Apply an event. Raises ValueError if events before it are missing."""
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
        """Return a unique name of an engine: its own, with its address appended if another engine has that name."""
        others = {other.name for other in self if other is not view}
        return event.name if event.name not in others else f"{event.name} ({view.url.partition('://')[2]})"

    def _drop(self, view: EngineView, names: set[str]) -> None:
        for name in list(names):
            view.names.discard(name)
            if self._holders.get(name) == view.number:
                del self._holders[name]


async def events_of(stream: aiohttp.StreamReader) -> AsyncIterator[Snapshot | Change]:
    """Yield the events of a stream of server-sent events. Raises msgspec.MsgspecError for an invalid one."""
    rest = b""
    async for chunk in stream.iter_any():
        *whole, rest = (rest + chunk).split(b"\n\n")
        for frame in whole:
            if frame.startswith(b"data: "):
                yield EVENTS.decode(frame[6:])
