"""The chat page: file and headers, access, the key of its websocket, and what it asks about sessions and slots."""

import base64
import hashlib
import re
import tomllib
from pathlib import Path

import aiohttp
import pytest

from baton.api.page.routes import FOLDER, SCRIPTS, STYLES
from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
KEY = "s3cret/ key (100%)"
AS_TOKEN = "openai-insecure-api-key.s3cret%2F%20key%20%28100%25%29"


async def test_the_page_runs_its_own_script_and_nothing_else() -> None:
    async with serving() as served, served.client.get("/") as response:
        text = await response.text()
        assert (response.status, response.content_type) == (200, "text/html")
        policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for element in ("script", "style"):
        [content] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(|\son\w+=|\sstyle=""", text)


def test_the_page_is_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["baton.api.page"]
    packed = {file for pattern in patterns for file in FOLDER.glob(pattern)}
    assert packed == {file for file in FOLDER.rglob("*.*") if file.suffix in (".html", ".css", ".js")}
    assert {file.stem for file in packed} == {"index", *STYLES, *SCRIPTS}


async def test_the_page_needs_no_key_and_allows_no_frames() -> None:
    """The page itself asks the user for a key. Other sites may link to the page, but not show it in a frame."""
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    async with serving(api_key=(KEY,)) as served:
        for headers, status in (
            ({}, 200),
            (link, 200),
            (link | {"Sec-Fetch-Dest": "iframe"}, 403),
            ({"Host": "evil.example"}, 403),
            ({"Origin": "https://evil.example"}, 403),
        ):
            async with served.client.get("/", headers=headers) as response:
                assert response.status == status, headers
        async with served.client.get("/v1/models", headers=link) as response:
            assert response.status == 403
        async with served.client.post("/") as response:
            assert response.status == 405


async def test_the_page_is_there_while_the_model_loads() -> None:
    async with serving(ready=False) as served, served.client.get("/") as response:
        assert response.status == 200


async def test_the_page_sends_its_key_as_a_subprotocol() -> None:
    async with serving(api_key=("plain", KEY)) as served:
        for key in ("openai-insecure-api-key.plain", AS_TOKEN):
            async with served.client.ws_connect(PATH, protocols=("responses", key)) as socket:
                assert socket.protocol == "responses"
        for protocols, status in (
            (("responses",), 401),
            (("responses", "openai-insecure-api-key.wrong"), 401),
            (("responses", "openai-insecure-api-key."), 401),
            (("responses", "openai-insecure-api-key.plain", AS_TOKEN), 401),
            (("openai-insecure-api-key.plain",), 400),
        ):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await served.client.ws_connect(PATH, protocols=protocols)
            assert caught.value.status == status, protocols


async def test_a_subprotocol_is_a_key_on_websockets_only() -> None:
    key = {"Sec-WebSocket-Protocol": "responses, openai-insecure-api-key.plain"}
    async with serving(api_key=("plain",)) as served:
        for path in ("/v1/models", PATH):
            async with served.client.get(path, headers=key) as response:
                assert response.status == 401
        wrong = {"Authorization": "Bearer wrong"}
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await served.client.ws_connect(
                PATH, headers=wrong, protocols=("responses", "openai-insecure-api-key.plain")
            )
        assert caught.value.status == 401


async def test_the_key_in_a_subprotocol_owns_its_sessions() -> None:
    headers = {"Authorization": "Bearer plain"}
    async with serving(api_key=("plain", "other")) as served:
        _, session = await served.post("/v1/sessions", {}, headers=headers)
        for key, kind in (("plain", "response.created"), ("other", "error")):
            protocols = ("responses", f"openai-insecure-api-key.{key}")
            async with served.client.ws_connect(PATH, protocols=protocols) as socket:
                await socket.send_json({"type": "response.create", "input": "a", "conversation": session["id"]})
                assert (await socket.receive_json(timeout=10))["type"] == kind


async def test_the_key_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(api_key=("plain",)) as served:
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await served.client.ws_connect(PATH, protocols=("openai-insecure-api-key.plain",))
    assert "plain" not in caplog.text


async def test_sessions_have_titles() -> None:
    async with serving(max_model_len=2000) as served:
        _, session = await served.post("/v1/sessions", {})
        assert session["title"] is None
        path = f"/v1/sessions/{session['id']}"
        await served.post(f"{path}/turns", {"messages": [{"role": "system", "content": "Be brief."}], "max_tokens": 0})
        messages = [{"role": "user", "content": "Tell me\n  " + "a story " * 50}]
        await served.post(f"{path}/turns", {"messages": messages})
        await served.post(f"{path}/turns", {"messages": [{"role": "user", "content": "Another."}]})
        async with served.client.get("/v1/sessions") as response:
            [listed] = (await response.json())["data"]
        assert listed["title"].startswith("Tell me a story a story")
        assert len(listed["title"]) == 100


async def test_the_slots_of_a_session() -> None:
    async with serving(api_key=("plain", "other")) as served:
        headers = {"Authorization": "Bearer plain"}
        _, session = await served.post("/v1/sessions", {}, headers=headers)
        [stored] = served.sessions.list(hashlib.sha256(b"plain").digest())
        served.ring.debug_slots = lambda: [{"slot": slot, "place": "cached"} for slot in range(4)]  # type: ignore[method-assign]
        served.ring.debug_tree = lambda: [  # type: ignore[method-assign]
            {"id": 0, "parent": None, "slot": None, "sessions": []},
            {"id": 1, "parent": 0, "slot": 2, "sessions": []},
            {"id": 2, "parent": 1, "slot": 0, "sessions": [stored.key]},
            {"id": 3, "parent": 1, "slot": 1, "sessions": ["another"]},
        ]
        used = stored.used
        for key, own in (("plain", {0, 2}), ("other", set())):
            query = {"session": session["id"]}
            authorization = {"Authorization": f"Bearer {key}"}
            async with served.client.get("/debug/slots", params=query, headers=authorization) as response:
                entries = await response.json()
            assert {entry["slot"] for entry in entries if entry["session"] == session["id"]} == own
            assert {entry["slot"] for entry in entries if entry["session"] is None} == set(range(4)) - own
        assert stored.used == used
