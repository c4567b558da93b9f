"""An engine for tests of a router in this process: it sends one snapshot, and no stream of its is complete."""

import asyncio
from collections.abc import Sequence

from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.actors.tokens import pack
from baton.api.errors import ApiError
from baton.api.events.feed import encoded
from baton.api.events.frames import CachedDigest, Load, Snapshot
from baton.api.parsing import RESUME
from baton.api.resuming import RESUMABLE, Begun, SentPart, TokensSent, comment

SILENT_S = 60


class FakeEngine:
    """An engine that begins a stream and then drops the connection or is silent, or that refuses to continue one."""

    def __init__(
        self,
        name: str,
        states: Sequence[CachedDigest] = (),
        refusal: ApiError | None = None,
        hangs: bool = False,
        stream: bytes = b"",
    ) -> None:
        """states: those of its snapshot. refusal: its answer to every request. hangs: it answers nothing.

        stream: what it streams before it is silent [a part of a correct stream, before it drops the connection]
        """
        self.asked = 0  # requests
        self._refusal, self._hangs, self._stream = refusal, hangs, stream
        self._snapshot = Snapshot(
            sequence=0,
            boot=name,
            name=name,
            model="m",
            role="both",
            phase="ready",
            load=Load(),
            states=[*states],
            names=[],
        )
        app = web.Application()
        app.add_routes([web.get("/v1/events", self._events), web.post("/{path:.*}", self._answer)])
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/"))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(encoded(self._snapshot))
        await asyncio.sleep(SILENT_S)
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self._hangs:
            await asyncio.sleep(SILENT_S)
        if (refusal := self._refusal) is not None:
            headers = {"Content-Type": "application/json", **refusal.headers}
            return web.Response(body=refusal.encode(), status=refusal.status, headers=headers)
        if RESUME in await request.json():
            return web.json_response({"error": {"message": "no"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", RESUMABLE: "1"})
        await response.prepare(request)
        if self._stream:
            await response.write(self._stream)
            await asyncio.sleep(SILENT_S)
        opening = b'data: {"n": 1}\n\n' + comment(Begun(ids=["a"], seeds=[1], limits=[9], weights=""))
        await response.write(opening + b'data: {"n": 2}\n\n' + comment(TokensSent(parts=[SentPart(0, pack([5]), 1)])))
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response
