"""A server with the part of the hub's API that a download uses, on loopback, with faults."""

import asyncio
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from aiohttp import web

COMMIT = "c0ffee" * 6 + "abcd"
TOKEN = "hf_right"
LFS = (".safetensors", ".bin", ".gguf")
HALF = 2**16


@dataclass
class FakeRepository:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    revisions: tuple[str, ...] = ("main", "v1")


@dataclass
class FakeRequest:
    method: str
    path: str
    range: str | None
    authorized: bool
    status: int = 0
    sent: int = 0  # bytes of files


@dataclass
class FakeHub:
    """The server's models, its faults, and every request for a file that it has answered."""

    models: dict[str, FakeRepository] = field(default_factory=dict)
    requests: list[FakeRequest] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)  # bytes after which the next answers with LFS content are cut
    cuts_at_once: bool = False  # whether LFS content is cut before its first byte, once cut_after is used up
    busy: list[int] = field(default_factory=list)  # statuses of the next answers with LFS content
    hold_after: int | None = None  # bytes after which an answer with LFS content stops without an end
    ends_after: int | None = None  # bytes after which LFS content ends too early
    damaged: bool = False  # whether LFS content has a wrong byte
    ignores_ranges: bool = False
    status: int | None = None  # status of all answers about models
    url: str = ""

    def add(self, name: str, folder: Path | None = None, files: Mapping[str, bytes] | None = None) -> FakeRepository:
        """Add a model with the files of a folder, and further files."""
        found = {each.name: each.read_bytes() for each in sorted(folder.iterdir())} if folder is not None else {}
        self.models[name] = FakeRepository(found | dict(files or {}))
        return self.models[name]

    def sent(self, suffix: str = "") -> int:
        """Return how many bytes of files with this suffix have been sent."""
        return sum(each.sent for each in self.requests if each.path.endswith(suffix))

    def content(self, digest: str) -> bytes:
        """Return the LFS content with this digest."""
        files = [content for model in self.models.values() for content in model.files.values()]
        return next(content for content in files if sha256(content) == digest)


@cache
def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def refusal(status: int, code: str) -> web.Response:
    return web.json_response({"error": code}, status=status, headers={"X-Error-Code": code, "X-Error-Message": code})


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the server in a thread."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    released = asyncio.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(make_app(hub, released), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        released.set()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def make_app(hub: FakeHub, released: asyncio.Event) -> web.Application:
    app = web.Application()
    routes = web.RouteTableDef()

    def refuse(request: web.Request, name: str, revision: str, of_file: bool) -> web.Response | None:
        model, token = hub.models.get(name), request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hub.status is not None:
            return refusal(hub.status, "Broken")
        if token not in ("", TOKEN):
            return refusal(401, "Invalid credentials in Authorization header")
        if model is None or (model.private and not token):
            return refusal(404 if token else 401, "RepoNotFound")
        if revision not in (*model.revisions, COMMIT):
            return refusal(404, "RevisionNotFound")
        return refusal(403 if token else 401, "GatedRepo") if model.gated and of_file else None

    @routes.get("/api/models/{name:[^/]+/[^/]+}/revision/{revision}")
    @routes.get("/api/models/{name:[^/]+/[^/]+}")
    async def info(request: web.Request) -> web.Response:
        name, revision = request.match_info["name"], request.match_info.get("revision", "main")
        if (refused := refuse(request, name, revision, False)) is not None:
            return refused
        files = [entry(file, content) for file, content in hub.models[name].files.items()]
        return web.json_response({"id": name, "sha": COMMIT, "siblings": files})

    @routes.get("/{name:[^/]+/[^/]+}/resolve/{revision}/{file:.+}")
    async def resolve(request: web.Request) -> web.StreamResponse:
        name, file = request.match_info["name"], request.match_info["file"]
        record = note(request)
        if (refused := refuse(request, name, request.match_info["revision"], True)) is not None:
            record.status = refused.status
            return refused
        content, headers = hub.models[name].files[file], {"X-Repo-Commit": COMMIT}
        if not file.endswith(LFS):
            return await send(request, record, content, {**headers, "ETag": f'"{git_id(content)}"'}, faulty=False)
        # The content of LFS files is on another host, which must not see the token.
        place = f"http://localhost:{request.url.port}/content/{sha256(content)}{Path(file).suffix}"
        headers |= {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content)), "Location": place}
        record.status = 302
        return web.Response(status=302, headers=headers)

    @routes.get("/content/{digest}.{suffix}")
    async def lfs(request: web.Request) -> web.StreamResponse:
        if hub.busy:
            return refusal(hub.busy.pop(0), "Busy")
        content = hub.content(request.match_info["digest"])[: hub.ends_after]
        if hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        return await send(request, note(request), content, {}, faulty=True)

    def note(request: web.Request) -> FakeRequest:
        made = FakeRequest(
            request.method, request.path, request.headers.get("Range"), "Authorization" in request.headers
        )
        hub.requests.append(made)
        return made

    async def send(
        request: web.Request, record: FakeRequest, content: bytes, headers: dict[str, str], faulty: bool
    ) -> web.StreamResponse:
        """Send the bytes of a range, with the faults that LFS content has."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", record.range or "")
        if match is not None and not (faulty and hub.ignores_ranges):
            if int(match[1]) >= len(content):
                return refusal(416, "RangeNotSatisfiable")
            start, stop = int(match[1]), int(match[2]) + 1 if match[2] else len(content)
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(content)) - 1}/{len(content)}"
            content, record.status = content[start:stop], 206
        else:
            record.status = 200
        answer = web.StreamResponse(status=record.status, headers=headers)
        answer.content_length = len(content)
        await answer.prepare(request)
        if request.method == "HEAD":
            return answer
        cut = hub.cut_after.pop(0) if faulty and hub.cut_after else None
        if faulty and cut is None and hub.cuts_at_once:
            return end(request, answer)
        for at in range(0, len(content), HALF):
            piece = content[at : at + HALF]
            await answer.write(piece)
            record.sent += len(piece)
            if faulty and hub.hold_after is not None and record.sent >= hub.hold_after:
                await released.wait()
            if cut is not None and record.sent >= cut:
                return end(request, answer)
        return answer

    def end(request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        """Cut the connection."""
        assert request.transport is not None
        request.transport.close()
        return answer

    app.add_routes(routes)
    return app


def entry(name: str, content: bytes) -> dict[str, object]:
    """Return a file as the hub lists it."""
    listed: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_id(content)}
    if name.endswith(LFS):
        listed["lfs"] = {"size": len(content), "sha256": sha256(content), "pointerSize": 134}
    return listed
