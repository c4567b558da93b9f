"""Many concurrent requests to a running server, and a well-behaved client (the canary) that must not be affected."""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from baton.models.hash_definition import expected_output
from tests.fuzz.client import Client
from tests.fuzz.oracles import LASTING, astray, complaint
from tests.fuzz.requests import ENDPOINTS, Endpoint, FuzzRequest, draw
from tests.fuzz.server import PATIENCE_S, RunningServer, serving
from tests.fuzz.shapes import SESSIONS, VOCAB

AT_ONCE = 8
HOME_S = 15.0  # how long the server may take to finish all open work after the last request
CANARY_PROMPTS = ([1, 2, 3], [250, 7] * 10, [9])
CANARY_TOKENS = 10
CANARY_PAUSE_S = 0.02
MOST_SHRINKS = 60  # how many smaller bodies are tried for a failing request
MOST_SHOWN = 1500  # characters


@dataclass(frozen=True)
class Failure:
    """A violated promise, and the numbers that repeat it."""

    what: str
    seed: int
    number: int | None = None  # which request caused it; None if no single one is known
    request: FuzzRequest | None = None

    def __str__(self) -> str:
        again = f"scripts/fuzz --seed {self.seed}" + (f" --only {self.number}" if self.number is not None else "")
        return f"{self.what[:MOST_SHOWN]}\n  again: {again}\n  {str(self.request or '')[:MOST_SHOWN]}"


@dataclass
class Campaign:
    """A run of all requests that a seed draws."""

    server: RunningServer
    seed: int
    exact: bool  # whether the server runs the hash model, whose tokens can be predicted
    endpoints: Sequence[Endpoint] = ENDPOINTS
    statuses: Counter[int] = field(default_factory=Counter)
    """How often each HTTP status was answered; status 0 counts requests whose client left first."""
    failures: list[Failure] = field(default_factory=list)
    canaries: int = 0  # how many answers the canary got
    home_s: float = HOME_S  # how long the server may take to finish all open work after the last request
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(self.server.host, self.server.port)

    async def run(self, numbers: Iterable[int], first_only: bool = False) -> list[Failure]:
        """Send the requests with these numbers while the canary runs, and return the failures."""
        left = iter(numbers)
        await self._set_up()

        async def work() -> None:
            for number in left:
                await self._one(number)
                if self.server.task.done() or (first_only and self.failures):
                    return

        async with self._canary():
            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        if not (first_only and self.failures):
            await self._come_home()
        return self.failures

    async def _set_up(self) -> None:
        """Create the sessions and the response that requests may name."""
        for id in SESSIONS:
            await self.server.post("/v1/sessions", {"id": id})
        stored = await self.server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2})
        self.client.known = stored["id"]

    async def _one(self, number: int) -> None:
        request = draw(self.seed, number, self.endpoints)
        what = await self.try_one(request)
        if what is not None:
            self.failures.append(Failure(what, self.seed, number, request))

    async def try_one(self, request: FuzzRequest) -> str | None:
        """Send a request and return what is wrong with its answer, or None."""
        sending = asyncio.create_task(self.client.send(request))
        await asyncio.wait([sending, self.server.task], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            sending.cancel()
            return "the server ended" if self.server.task.done() else f"no answer within {PATIENCE_S:g} s"
        answer = sending.result()
        self.statuses[answer.status if answer is not None else 0] += 1
        return complaint(request, answer, self.exact)

    @asynccontextmanager
    async def _canary(self) -> AsyncIterator[None]:
        """Run a well-behaved client while the block runs. Its answers must equal those it gets from an idle server."""
        alone = [expected_output(p, CANARY_TOKENS, VOCAB) if self.exact else await self._ask(p) for p in CANARY_PROMPTS]

        async def sing() -> None:
            for prompt, expected in itertools.cycle(zip(CANARY_PROMPTS, alone, strict=True)):
                answer = await self._ask(prompt)
                self.canaries += 1
                if answer != expected:
                    self.failures.append(Failure(f"{prompt} was answered with {answer}, not {expected}", self.seed))
                    return
                await asyncio.sleep(CANARY_PAUSE_S)

        singing = asyncio.create_task(sing())
        try:
            yield
        finally:
            singing.cancel()
            with suppress(asyncio.CancelledError):
                await singing

    async def _ask(self, prompt: list[int]) -> Any:
        """Return the tokens of an answer, or the error or body that came instead. Retry while the queue is full."""
        params = {"temperature": 0, "max_new_tokens": CANARY_TOKENS, "ignore_eos": True}
        while True:
            try:
                answer = await self.server.post("/generate", {"input_ids": prompt, "sampling_params": params})
            except (OSError, aiohttp.ClientError) as error:
                return repr(error)
            if answer.get("error", {}).get("code") != "queue_full":
                return answer.get("output_ids", answer)
            await asyncio.sleep(CANARY_PAUSE_S)

    async def _come_home(self) -> None:
        """Wait until all requests, turns and copies have ended, and check that the server is idle and sound."""
        deadline = time.monotonic() + self.home_s
        wrong = await astray(self.server)
        while wrong and not wrong.keys() & LASTING and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            wrong = await astray(self.server)
        if wrong:
            self.failures.append(Failure(f"astray: {wrong}", self.seed))


async def fuzz(
    folder: Path | None,
    seed: int,
    numbers: Iterable[int],
    endpoints: Sequence[Endpoint] = ENDPOINTS,
    first_only: bool = False,
    home_s: float = HOME_S,
    **options: Any,
) -> Campaign:
    """Run a campaign against a new server, with the hash model in `folder`, or with the bundled model if it is None."""
    async with serving(folder, **options) as server:
        campaign = Campaign(server, seed, folder is not None, endpoints, home_s=home_s)
        await campaign.run(numbers, first_only)
    if not server.task.done() or server.task.exception() is not None or server.task.result() != 0:
        campaign.failures.append(Failure(f"the server did not end well: {server.task}", seed))
    return campaign


# Reducing a failing request


async def shrink(request: FuzzRequest, fails: Callable[[FuzzRequest], Awaitable[bool]]) -> FuzzRequest:
    """Remove headers and body fields from a failing request while it keeps failing. Its body must be JSON."""
    left = MOST_SHRINKS
    if request.headers and await fails(replace(request, headers=())):
        request = replace(request, headers=())
    if request.leaves is not None and await fails(replace(request, leaves=None)):
        request = replace(request, leaves=None)
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        return request
    at = 0
    while left > 0 and at < len(places := list(removable(body))):
        less = without(body, places[at])
        tried = replace(request, body=json.dumps(less).encode())
        left -= 1
        if await fails(tried):
            request, body = tried, less
        else:
            at += 1
    return request


def removable(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all object members and list items in a JSON value, outermost first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    own = [(*path, key) for key, _ in items]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return own + [inner for key, item in items for inner in removable(item, (*path, key))]


def without(value: Any, path: tuple[Any, ...]) -> Any:
    """Return a copy of the value without the member or item at this path."""
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        copy[key] = without(copy[key], tuple(rest))
    else:
        del copy[key]
    return copy
