"""Forwarding of requests to engines. If one fails before its answer has begun, another engine is tried."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from baton.api import errors
from baton.api.events.places import HEADER, read_places
from baton.api.routing.asking import Asking
from baton.api.routing.bodies import EngineConnection
from baton.api.routing.choice import Sent
from baton.api.routing.counts import RouterCounts
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.prompts import Chains

MOST_RETRIES = 2  # further engines that are tried for a request
NO_ENGINE_S = 5.0  # how long a request waits if no engine takes requests, or if the engine with its session is lost
LEARNING_S = 0.5  # how long a request waits for an event that names its session or response, which may be new
MOVED_S = 2.0  # how long a request waits for an event that names its session after the session has moved
AGAIN = (502, 503, 529)  # statuses after which another engine is tried
NOT_FOUND = 404
MOVED = b'"session_moved"'  # the error code of a session that has moved
HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "host", "content-length", "content-encoding", "expect", "origin", "sec-fetch-site",
    }
)  # fmt: skip
"""Headers of a request that are not forwarded: they concern one connection, or the router has checked them."""
NOT_ANSWERED = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "trailer", "upgrade", "server", "date", HEADER}
)
"""Headers of an engine's answer that the client does not get."""


class Unanswered(Exception):
    """The error of an engine that failed or refused before its answer began, so that another engine can be tried."""

    def __init__(self, why: str, response: web.Response | None = None) -> None:
        """response: the engine's refusal; None if it did not answer."""
        super().__init__(why)
        self.response = response


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A client's request in the form in which it is sent to engines."""

    method: str
    path: str  # with the query
    headers: "CIMultiDict[str]"
    body: bytes
    asking: Asking
    deadline: float  # when the client gets a 504 if no engine has answered, on the event loop's clock


@dataclass(frozen=True, slots=True)
class EngineStream:
    """A stream of events from an engine, which has begun."""

    view: EngineView
    answer: aiohttp.ClientResponse
    body: EngineConnection


class Forwarder:
    """The part of a router that forwards requests to the engines of a fleet."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, counts: RouterCounts) -> None:
        self._fleet, self._http, self._counts = fleet, http, counts
        self._chains = Chains(fleet.index)

    async def begin(self, call: ClientCall) -> EngineStream | web.Response:
        """Send a request to engines until one answers. Return that answer, or the last engine's refusal.

        Raises ApiError 503 if no engine answers, and 504 at the deadline.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout_at(call.deadline):
                return await self._try_engines(call)
        except TimeoutError:
            raise errors.timed_out(loop.time() - started) from None

    async def pick(self, asking: Asking, but: Iterable[int] = ()) -> tuple[EngineView, Sent | None]:
        """Return the engine for a request. Raises ApiError 503 if there is none, 400 if a session's id is taken."""
        if asking.bound and (holder := await self._holder(asking.bound)) is not None:
            self._check_new(asking, holder)
            return holder, None
        if asking.opens and (view := await self._opening(asking, but)) is not None:
            return view, None
        chosen = await self._fleet.choose(self._chains.demand(asking.chain), but, NO_ENGINE_S)
        if chosen is None:
            raise self._fleet.refusal()
        self._chains.sent(asking.chain, chosen.engine)
        return self._fleet[chosen.engine], chosen.sent

    def learn(self, asking: Asking, text: str) -> None:
        """Note where an engine has states of a request's prompt. text: from `places_of`, or empty or invalid."""
        try:
            length, places = read_places(text)
        except ValueError:
            return
        self._chains.learn(asking.chain, length, places)

    async def _holder(self, name: str) -> EngineView | None:
        """Return the engine that has a session or response; None if no engine has it.

        Raises ApiError 503 if an engine that may have it is still loading, or if the engine that has it is lost.
        """
        view = await self._fleet.find(name, LEARNING_S)
        if view is None and any(each.phase == "loading" for each in self._fleet):
            raise errors.loading()
        if view is None or view.phase != "lost":
            return view
        if (view := await self._fleet.find(name, NO_ENGINE_S, lost=False)) is None:
            raise errors.unavailable("the engine that has the session or response does not answer", "engine_lost")
        return view

    async def _opening(self, asking: Asking, but: Iterable[int]) -> EngineView | None:
        """Return the engine that opens a session: if the id is taken, the engine that has it, which will refuse."""
        name = asking.new_name
        if name and self._fleet.holder(name) is not None:
            view = await self._holder(name)
            if view is not None and view.number not in but:
                return view
        view = self._fleet.emptiest(but)
        if view is not None and name:
            self._fleet.expect(name, view)
        return view

    def _check_new(self, asking: Asking, view: EngineView) -> None:
        """Check the id that a request gives a copy of a session. Raises ApiError 400 if another engine has the id."""
        if not asking.new_name:
            return
        if self._fleet.holder(asking.new_name) not in (None, view):
            raise errors.bad_request(f"session {asking.new_id!r} exists already", "id", "duplicate_session_id")
        self._fleet.expect(asking.new_name, view)

    async def _try_engines(self, call: ClientCall) -> EngineStream | web.Response:
        tried = list[int]()
        while True:
            view, sent = await self.pick(call.asking, tried)
            self._counts.request(view)
            try:
                return await self._ask(call, view, sent)
            except Unanswered as failure:
                tried.append(view.number)
                if len(tried) > MOST_RETRIES or not await self._other_engine(call.asking, view):
                    return given_up(view, failure)
                self._counts.retries.inc()
                log = structlog.get_logger()
                log.warning("another engine is tried", after=view.name or view.url, why=str(failure))

    async def _other_engine(self, asking: Asking, view: EngineView) -> bool:
        """Return whether another engine may answer. A request for a session first waits until the session has moved."""
        # A removed engine may have had the session, although the fleet knows no holder any more.
        if not asking.bound or (view in self._fleet and self._fleet.holder(asking.bound) is None):
            return True
        return await self._fleet.find(asking.bound, MOVED_S, but=view) is not None

    async def _ask(self, call: ClientCall, view: EngineView, sent: Sent | None) -> EngineStream | web.Response:
        """Send a request to one engine. Return its answer, or its stream once it has begun. Raises Unanswered."""
        url = URL(f"{view.url}{call.path}", encoded=True)
        request = self._http.request(call.method, url, data=call.body, headers=call.headers, allow_redirects=False)
        try:
            with view.unless_lost():
                answer = await request
            connection = answer.connection.protocol if answer.connection is not None else None
            if isinstance(connection, EngineConnection) and connection.streams:
                return EngineStream(view, answer, connection)
            async with answer:
                with view.unless_lost():
                    body = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._fleet.doubt(view, f"{type(error).__name__}: {error}")
            raise Unanswered(str(error) or type(error).__name__) from error
        finally:
            if sent is not None:
                self._fleet.engines.answered(sent)
        whole = web.Response(body=body, status=answer.status, reason=answer.reason, headers=answered(answer.headers))
        if another_may_answer(answer, body):
            raise Unanswered(f"status {answer.status}", whole)
        self.learn(call.asking, answer.headers.get(HEADER, ""))
        return whole


def another_may_answer(answer: aiohttp.ClientResponse, body: bytes) -> bool:
    """Return whether another engine should be tried after this answer: it is a refusal that others may not give."""
    if answer.headers.get(errors.SHOULD_RETRY) == "false":
        return False
    return answer.status in AGAIN or (answer.status == NOT_FOUND and MOVED in body)


def given_up(view: EngineView, failure: Unanswered) -> web.Response:
    """Return the engine's own refusal. Raises ApiError 503 if it gave none."""
    if failure.response is None:
        raise errors.unavailable(f"the engine {view.name or view.url} did not answer: {failure}", "engine_lost")
    return failure.response


def passed_on(headers: Mapping[str, str], but: frozenset[str]) -> "CIMultiDict[str]":
    """Return headers without some of them."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in but)


def answered(headers: Mapping[str, str]) -> "CIMultiDict[str]":
    """Return the headers of an engine's answer for the client."""
    return passed_on(headers, NOT_ANSWERED)
