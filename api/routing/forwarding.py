"""Passing requests on to engines: another engine if one fails before its answer has begun."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import aiohttp
import msgspec
import structlog
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from baton.api import errors
from baton.api.connections.body import whole_body
from baton.api.errors import ApiError
from baton.api.events.places import HEADER, PLACES, read_places
from baton.api.parsing import RESUME
from baton.api.resuming import RESUMABLE, ROUTED, Resumption
from baton.api.routing.asking import Asking, read_asking
from baton.api.routing.choice import Sent
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.prompts import Chains
from baton.api.routing.streams import StreamCopy
from baton.api.security import owner_of

MOST_RETRIES = 2
NO_ENGINE_S = 5.0  # how long a request waits while no engine takes requests
LEARNING_S = 0.5  # how long a request waits for the events of a session or response that was just made
AGAIN = (502, 503, 529)  # statuses after which another engine may answer
HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "host", "content-length", "content-encoding", "expect", "origin", "sec-fetch-site",
    }
)  # fmt: skip
"""Headers of a request that are not passed on: they are about one connection, or were checked by the router."""
NOT_ANSWERED = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "trailer", "upgrade", "server", "date", HEADER}
)


class Unanswered(Exception):
    """An engine has not begun an answer, so that another engine may answer."""

    def __init__(self, why: str, response: web.Response | None = None) -> None:
        """response: the engine's answer, if there is one."""
        super().__init__(why)
        self.response = response


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A client's request, as it is sent to engines."""

    method: str
    path: str  # with the query
    headers: "CIMultiDict[str]"
    body: bytes
    asking: Asking


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The answer of an engine, which has begun."""

    view: EngineView
    answer: aiohttp.ClientResponse


class Forwarder:
    """Passes requests on to the engines of a fleet."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        self._fleet, self._http = fleet, http
        self._chains = Chains()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with an engine's answer. Raises ApiError 503 if no engine answers."""
        async with whole_body(request) as view_of_body:
            body = bytes(view_of_body)
            asking = read_asking(request.path, body, owner_of(request))
            headers = passed_on(request.headers, HOP_BY_HOP)
            headers[ROUTED] = "1"
            call = ClientCall(request.method, request.rel_url.raw_path_qs, headers, body, asking)
            begun = await self._begin(call)
            return begun if isinstance(begun, web.Response) else await self._deliver(request, call, begun)

    async def pick(self, asking: Asking, but: Iterable[int] = ()) -> tuple[EngineView, Sent | None]:
        """Return the engine for a request. Raises ApiError 503 if there is none."""
        if asking.bound and (holder := await self._fleet.find(asking.bound, LEARNING_S)) is not None:
            return holder, None
        if asking.opens and (view := self._fleet.emptiest(but)) is not None:
            return view, None
        chosen = await self._fleet.choose(self._chains.demand(asking.chain), but, NO_ENGINE_S)
        if chosen is None:
            raise errors.unavailable("no engine is ready", "no_engine")
        return self._fleet[chosen.engine], chosen.sent

    async def _begin(self, call: ClientCall) -> EngineAnswer | web.Response:
        """Send a request to engines until one begins an answer. Return that, or the last engine's refusal.

        Raises ApiError 503 if no engine answers.
        """
        tried = list[int]()
        while True:
            view, sent = await self.pick(call.asking, tried)
            try:
                return EngineAnswer(view, await self._ask(call, view, sent))
            except Unanswered as failure:
                tried.append(view.number)
                if call.asking.bound or len(tried) > MOST_RETRIES:
                    return given_up(view, failure)
                log = structlog.get_logger()
                log.warning("another engine is tried", after=view.name or view.url, why=str(failure))

    async def _ask(self, call: ClientCall, view: EngineView, sent: Sent | None) -> aiohttp.ClientResponse:
        """Send a request to an engine, and return its answer when that begins. Raises Unanswered."""
        url = URL(f"{view.url}{call.path}", encoded=True)
        asking = self._http.request(call.method, url, data=call.body, headers=call.headers, allow_redirects=False)
        try:
            answer = await view.unless_lost(asking)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._fleet.doubt(view, f"{type(error).__name__}: {error}")
            raise Unanswered(str(error) or type(error).__name__) from error
        finally:
            if sent is not None:
                self._fleet.engines.answered(sent)
        if answer.status in AGAIN:
            async with answer:
                whole = web.Response(body=await answer.read(), status=answer.status, headers=answered(answer.headers))
            raise Unanswered(f"status {answer.status}", whole)
        return answer

    async def _deliver(self, request: web.Request, call: ClientCall, begun: EngineAnswer) -> web.StreamResponse:
        """Pass an answer on to the client. If its engine fails, another one continues it, if it is such a stream."""
        first = begun.answer
        self._learn(call.asking, first.headers.get(HEADER, ""))
        response = web.StreamResponse(status=first.status, reason=first.reason, headers=answered(first.headers))
        copy = StreamCopy() if RESUMABLE in first.headers else None
        await response.prepare(request)
        for _ in range(1 + MOST_RETRIES):
            try:
                await self._copy(begun, response, copy, call.asking)
                self._learn(call.asking, copy.places if copy is not None else "")
                return response
            except (aiohttp.ClientError, TimeoutError) as error:
                self._fleet.doubt(begun.view, f"{type(error).__name__}: {error}")
            if copy is not None and copy.complete:
                return response
            if copy is None or not copy.can_go_on or call.asking.bound:
                break
            structlog.get_logger().warning("another engine continues a stream", after=begun.view.name)
            again = await self._continue(call, copy.resumption)
            if again is None:
                break
            begun = again
            copy.begin_again()
        if request.transport is not None:
            request.transport.close()  # the client sees that the answer is not complete
        raise ConnectionResetError("the engine was lost in the middle of an answer")

    async def _continue(self, call: ClientCall, resumption: Resumption | None) -> EngineAnswer | None:
        """Let another engine continue a stream. Return its answer; None if none can.

        resumption: the beginning that the client has; None: nothing.
        """
        if resumption is not None:
            field = f'{{"{RESUME}":'.encode() + msgspec.json.encode(resumption)
            call = replace(call, body=field + b"," + call.body.lstrip()[1:])
        log = structlog.get_logger()
        try:
            begun = await self._begin(call)
        except ApiError as error:
            log.warning("a stream cannot be continued", why=str(error))
            return None
        if isinstance(begun, EngineAnswer) and RESUMABLE in begun.answer.headers:
            return begun
        if isinstance(begun, EngineAnswer):
            begun.answer.close()
        status = begun.answer.status if isinstance(begun, EngineAnswer) else begun.status
        log.warning("a stream cannot be continued", why=f"status {status}")
        return None

    async def _copy(
        self, begun: EngineAnswer, response: web.StreamResponse, copy: StreamCopy | None, asking: Asking
    ) -> None:
        """Copy the body of an answer. Raises aiohttp.ClientError if the engine fails before its end."""
        async with begun.answer as answer:
            with begun.view.closing_when_lost(answer):
                async for chunk in answer.content.iter_any():
                    if copy is not None:
                        chunk = copy.take(chunk)
                    elif (at := chunk.rfind(PLACES)) >= 0:
                        self._learn(asking, chunk[at + len(PLACES) :].partition(b"\n")[0].decode())
                        chunk = chunk[:at]
                    if chunk:
                        await write(response, chunk)

    def _learn(self, asking: Asking, text: str) -> None:
        if text:
            length, places = read_places(text)
            self._chains.learn(asking.chain, length, places)


async def write(response: web.StreamResponse, chunk: bytes) -> None:
    """Write to the client. Raises ConnectionResetError if the client has left.

    aiohttp's own error is the one that it raises where an engine is lost, and the engine is not at fault here.
    """
    try:
        await response.write(chunk)
    except ConnectionError as error:
        raise ConnectionResetError("the client has left") from error


def given_up(view: EngineView, failure: Unanswered) -> web.Response:
    """Return the engine's own answer. Raises ApiError 503 if it gave none."""
    if failure.response is None:
        raise errors.unavailable(f"the engine {view.name or view.url} did not answer: {failure}", "engine_lost")
    return failure.response


def passed_on(headers: Mapping[str, str], but: frozenset[str]) -> "CIMultiDict[str]":
    """Return headers without some of them."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in but)


def answered(headers: Mapping[str, str]) -> "CIMultiDict[str]":
    """Return the headers of an engine's answer for the client."""
    return passed_on(headers, NOT_ANSWERED)
