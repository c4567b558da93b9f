"""Requests that all engines answer together: lists, metrics, and commands to every engine."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, cast

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.api import errors
from baton.api.exchange import answer_json
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.forwarding import HOP_BY_HOP, answered, passed_on

TIMEOUT_S = 10.0
PREFIX, TOTAL_PREFIX = "baton:", "baton:all_engines_"
NOT_ADDED = ("baton:state_chance",)  # gauges whose sum over engines has no meaning


class EngineMetrics:
    """A collector of the engines' metrics, labelled with the engine's name, and of their sums over the engines."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, engine: str, text: str) -> None:
        for family in text_string_to_metric_families(text):
            known = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                known.add_sample(sample.name, {"engine": engine, **sample.labels}, sample.value)

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()
        for family in self._families.values():
            is_time = family.name.endswith("_created")
            if family.name.startswith(PREFIX) and family.name not in NOT_ADDED and not is_time:
                yield total(family)


def total(family: Metric) -> Metric:
    """Return a family's sums over the engines, under another name, so that queries do not add engines and sums."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        labels = tuple(item for item in sample.labels.items() if item[0] != "engine")
        name = sample.name.replace(PREFIX, TOTAL_PREFIX, 1)
        sums[name, labels] = sums.get((name, labels), 0.0) + sample.value
    metric = Metric(family.name.replace(PREFIX, TOTAL_PREFIX, 1), f"All engines: {family.documentation}", family.type)
    for (name, labels), value in sums.items():
        metric.add_sample(name, dict(labels), value)
    return metric


def sum_of(bodies: Sequence[bytes]) -> web.Response | None:
    """Return the sums of the engines' answers if they are objects with counts, such as {"aborted": 2}; else None."""
    try:
        found = [msgspec.json.decode(body, type=dict[str, int]) for body in bodies]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return answer_json({name: sum(each.get(name, 0) for each in found) for name in found[-1]})


class AllEngines:
    """The part of a router that asks all engines and joins their answers."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, own: CollectorRegistry) -> None:
        """own: the router's metrics."""
        self._fleet, self._http, self._own = fleet, http, own

    async def metrics(self) -> web.Response:
        """Return the metrics of the router, and of all engines that answer."""
        found, views = EngineMetrics(), self._views()
        for view, text in zip(views, await self._texts("/metrics", views), strict=True):
            if text is not None:
                found.add(view.name, text)
        registry = CollectorRegistry()
        registry.register(found)
        body = generate_latest(self._own) + generate_latest(registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def sessions(self, request: web.Request) -> web.Response:
        """List the client's sessions on all engines."""
        answers = await self._answers(request)
        return answer_json({"object": "list", "data": [item for _, answer in answers for item in answer["data"]]})

    async def listed(self, request: web.Request) -> web.Response:
        """Join the lists that the engines answer. Each object gets the name of its engine as `engine_name`."""
        answers = await self._answers(request)
        return answer_json([{"engine_name": view.name, **item} for view, answer in answers for item in answer])

    async def _answers(self, request: web.Request) -> list[tuple[EngineView, Any]]:
        """Return the engines' answers to a client's GET. Raises ApiError 503 if no engine answers."""
        headers, views = passed_on(request.headers, HOP_BY_HOP), self._views()
        texts = await self._texts(request.path_qs, views, headers)
        if all(text is None for text in texts):
            raise errors.unavailable("no engine is ready", "no_engine")
        return [(view, msgspec.json.decode(text)) for view, text in zip(views, texts, strict=True) if text is not None]

    async def ask_all(self, request: web.Request) -> web.Response:
        """Send a request to every engine. Return the first answer that is an error, or else the sum of their answers.

        If the answers cannot be added, return the last one. Raises ApiError 503 if an engine does not answer; the other
        engines have carried out the request nevertheless.
        """
        body, views = await request.read(), self._views()
        answers = await asyncio.gather(*(self._ask(view, request, body) for view in views), return_exceptions=True)
        responses = list[web.Response]()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            if answer.status >= 400:
                return answer
            responses.append(answer)
        if not responses:
            raise errors.unavailable("no engine is ready", "no_engine")
        return sum_of([cast(bytes, response.body) for response in responses]) or responses[-1]

    async def _ask(self, view: EngineView, request: web.Request, body: bytes) -> web.Response:
        """Return an engine's answer to a client's request. Raises ApiError 503 if it does not answer."""
        headers, url = passed_on(request.headers, HOP_BY_HOP), f"{view.url}{request.path_qs}"
        try:
            with view.unless_lost():
                async with self._http.request(request.method, url, data=body, headers=headers) as answer:
                    content = await answer.read()
                    return web.Response(body=content, status=answer.status, headers=answered(answer.headers))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise errors.unavailable(f"the engine {view.name} did not answer: {error}", "engine_lost") from None

    def _views(self) -> list[EngineView]:
        return [view for view in self._fleet if view.phase != "lost"]

    async def _texts(
        self, path: str, views: list[EngineView], headers: "aiohttp.typedefs.LooseHeaders | None" = None
    ) -> list[str | None]:
        """Return each engine's answer to GET; None for an engine that does not answer with 200."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)

        async def get(view: EngineView) -> str | None:
            try:
                with view.unless_lost():
                    async with self._http.get(f"{view.url}{path}", headers=headers, timeout=timeout) as answer:
                        return await answer.text() if answer.status == 200 else None
            except (aiohttp.ClientError, OSError, TimeoutError):
                return None

        return await asyncio.gather(*(get(view) for view in views))
