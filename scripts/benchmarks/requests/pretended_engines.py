"""Pretended engines: one process that answers for any number of addresses of this machine, 127.0.0.1 and following.

Each has an event stream with cached states, and answers each request with the same tokens, at a fixed pace.

python -m scripts.benchmarks.requests.pretended_engines --port PORT --states 1000 --gap 20
"""

import argparse
import asyncio
import random

import msgspec
import uvloop
from aiohttp import web

from baton.actors.tokens import pack
from baton.api.connections.limits import raise_descriptor_limit
from baton.api.events.feed import BEAT_S, encoded
from baton.api.events.frames import CachedDigest, Change, Load, Snapshot
from baton.api.resuming import RESUMABLE, Begun, SentPart, TokensSent, comment
from baton.api.sse import DONE, frames

HIGHEST = 254  # in the last part of an address


def address(number: int) -> str:
    """Return the address of an engine."""
    return f"127.0.{number // HIGHEST}.{1 + number % HIGHEST}"


class PretendedEngines:
    """The engines' answers to a router."""

    def __init__(self, states: int, gap: float) -> None:
        """gap: seconds between two tokens."""
        self._states, self._gap = states, gap
        self._load = Load(token_seconds=1e-4, step_seconds=gap, slots={"cached": 64})

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response()

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send a snapshot, and then a change whenever one is due, with a state that is new and one that is gone."""
        assert request.transport is not None
        name = request.transport.get_extra_info("sockname")[0]
        chance = random.Random(name)
        states = [f"{chance.getrandbits(64):016x}" for _ in range(self._states)]
        response = web.StreamResponse()
        await response.prepare(request)
        start = Snapshot(
            sequence=0, boot=name, name=name, model="pretended", role="both", phase="ready", load=self._load, names=[],
            states=[CachedDigest(digest, 100, "slot") for digest in states],
        )  # fmt: skip
        await response.write(encoded(start))
        await asyncio.sleep(BEAT_S * chance.random())
        for sequence in range(1, 10**9):
            fresh = f"{chance.getrandbits(64):016x}"
            states.append(fresh)
            gone = [states.pop(0)]
            change = Change(
                sequence=sequence, phase="ready", load=self._load, states=[CachedDigest(fresh, 100, "slot")], gone=gone
            )
            await response.write(encoded(change))
            await asyncio.sleep(BEAT_S)
        return response

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion, as a stream with the comments for the router or at once."""
        body = msgspec.json.decode(await request.read())
        if not body.get("stream"):
            return web.json_response(completion("a" * body["max_tokens"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", RESUMABLE: "1"})
        await response.prepare(request)
        await response.write(comment(Begun(ids=["cmpl-" + "a" * 32], seeds=[1], limits=[10**6], weights="")))
        for number in range(1, 1 + body["max_tokens"]):
            ended = number == body["max_tokens"]
            passed = comment(TokensSent(parts=[SentPart(0, pack([97]), number, ended)]))
            await response.write(frames([completion("a")]) + passed)
            await asyncio.sleep(self._gap)
        await response.write(DONE)
        return response


def completion(text: str) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    about = {"id": "cmpl-" + "a" * 32, "object": "text_completion", "created": 1, "model": "pretended"}
    return {**about, "choices": [choice]}


async def serve(port: int, engines: PretendedEngines) -> None:
    app = web.Application()
    app.add_routes([web.get("/ready", engines.ready), web.get("/v1/events", engines.events)])
    app.add_routes([web.post("/{path:.*}", engines.answer)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port, backlog=4096).start()  # all addresses of this machine's loopback
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--states", type=int, default=1000, help="cached states of each engine")
    parser.add_argument("--gap", type=float, default=20.0, help="milliseconds between two tokens of a stream")
    options = parser.parse_args()
    raise_descriptor_limit()
    uvloop.run(serve(options.port, PretendedEngines(options.states, options.gap / 1000)))
