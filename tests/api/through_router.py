"""A router in front of the engines of a test, if BATON_TESTS_THROUGH_ROUTER names their roles: "both,both".

The engines that answer are one object for the test.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from inspect import isawaitable
from itertools import chain
from typing import Any, TypeVar, cast

import pytest

from baton.api.cli.commands import OF_ROUTER
from baton.api.config import Config
from baton.api.errors import ApiError
from baton.api.routing.app import make_router
from baton.api.routing.router import ROUTER

ROLES = tuple(os.environ.get("BATON_TESTS_THROUGH_ROUTER", "").split(","))
THROUGH_ROUTER = ROLES != ("",)
# The tests that set these options look at the files, or at the limits, of one engine.
OF_ONE_ENGINE = frozenset({"session_dir", "session_cap", "session_log", "session_memory", "response_memory"})
VALUES = (str, bytes, bool, float, Mapping, type(None))
T = TypeVar("T")
not_through_router = pytest.mark.skipif(THROUGH_ROUTER, reason="looks into the process, which is the router's then")


def roles_of(options: Collection[str], ready: bool) -> Sequence[str]:
    """Return the roles of a test's engines. One that loads is alone, because requests wait for it."""
    return ROLES if THROUGH_ROUTER and ready and not OF_ONE_ENGINE & set(options) else ("both",)


@asynccontextmanager
async def router_of(urls: Sequence[str], options: Mapping[str, Any], serve: Callable[..., Any]) -> AsyncIterator[Any]:
    """Yield a client of a router in front of engines, after the router has found all of them.

    options: the engines' own, of which the router gets those that it has too.
    serve: makes the client of an application, as a context.
    """
    accepted = {name: value for name, value in options.items() if name in OF_ROUTER}
    app = make_router(Config(engine=tuple(urls), **accepted))
    async with serve(app) as client:
        views = app[ROUTER].fleet
        async with asyncio.timeout(10):
            while any(view.phase == "lost" for view in views):  # noqa: ASYNC110 (a router has no event for tests)
                await asyncio.sleep(0.01)
        yield client


class Together:
    """The same object of several engines. Attributes are set on each, and calls are made on each, with joined results.

    Numbers are added, lists and dictionaries joined; of other values the first one counts.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.__dict__["_parts"] = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts)

    def __getattr__(self, name: str) -> Any:
        return joined([getattr(part, name) for part in self._parts])

    def __setattr__(self, name: str, value: object) -> None:
        for part in self._parts:
            setattr(part, name, value)


def together(parts: Sequence[T]) -> T:
    """Return the only part, or all of them as one object."""
    return cast(T, Together(parts)) if len(parts) > 1 else parts[0]


def joined(parts: Sequence[Any]) -> Any:
    """Return the values of several engines as one value."""
    first = parts[0]
    if all(part is first for part in parts):
        return first
    if callable(first):
        return partial(call_all, parts)
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(parts)
    if isinstance(first, dict):
        return {key: value for part in parts for key, value in part.items()}
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isawaitable(first):
        return asyncio.gather(*parts)
    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 or isinstance(found[0], VALUES) else Together(parts)


def call_all(calls: Sequence[Callable[..., Any]], *arguments: Any, **named: Any) -> Any:
    """Return the joined results of calls. An object that only one engine has is found, though the others refuse."""
    results, refusals = list[Any](), list[ApiError]()
    for call in calls:
        try:
            results.append(call(*arguments, **named))
        except ApiError as error:
            refusals.append(error)
    if not results:
        raise refusals[0]
    return joined(results)
