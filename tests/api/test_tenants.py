"""Two API keys on one server: neither can find out what the other has sent, nor access what it has stored."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from baton.actors.messages import Name, Submit
from tests.api.fake_ring import Served, serving
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
KEYS = ("first", "second")
MESSAGES = [{"role": "user", "content": "a"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "a"},
    "/v1/sessions/s/turns": {"messages": MESSAGES},
    "/generate": {"text": "a"},
    "/generate in a session": {"text": "a", "session_params": {"id": "s"}},
}


async def salts(served: Served, path: str, body: dict[str, Any], **salt: str) -> list[str]:
    """Send a request with each key, and return the salts that arrive in the ring."""
    for key in KEYS:
        headers = {"Authorization": f"Bearer {key}"}
        await served.post("/v1/sessions", {"id": "s"}, headers=headers)
        status, answer = await served.post(path.partition(" ")[0], body | salt, headers=headers)
        assert status == 200, answer
    return [message.request.salt for message in served.ring.sent if isinstance(message, Submit)]


@pytest.mark.parametrize("path", REQUESTS)
async def test_keys_share_no_cached_prompts(path: str) -> None:
    async with serving(api_key=KEYS) as served:
        first, second = await salts(served, path, REQUESTS[path])
        names = {message.salt for message in served.ring.sent if isinstance(message, Name)}
    assert first != second
    assert names <= {first, second}, "a session goes on from what its turns have left"


async def test_a_salt_separates_the_cached_prompts_of_one_key() -> None:
    path = "/v1/completions"
    async with serving(api_key=KEYS) as served:
        plain = await salts(served, path, REQUESTS[path])
        salted = await salts(served, path, REQUESTS[path], cache_salt="mine")
    assert len({*plain, *salted[2:]}) == 4


@pytest.mark.parametrize("options", [{"api_key": KEYS, "share_cache": True}, {}])
async def test_an_operator_may_share_and_without_keys_there_is_one_tenant(options: dict[str, Any]) -> None:
    path = "/v1/completions"
    async with serving(**options) as served:
        assert set(await salts(served, path, REQUESTS[path])) == {""}


def test_a_code_cannot_be_read_by_asking_for_it() -> None:
    """`matched_tokens` counts only tokens that the same key has sent before."""
    code = "The code of the safe is 73914."
    with ServerProcess((*SERVE, "--api-key", "first", "--api-key", "second")) as server:
        for key, is_known in (("first", False), ("second", False), ("first", True)):
            body = json.dumps({"prompt": code, "max_tokens": 1}).encode()
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            with urlopen(Request(f"{server.url}/v1/completions", body, headers), timeout=60) as response:
                usage = json.load(response)["usage"]
            known = usage["prompt_tokens"] - 1 if is_known else 0
            assert usage["prompt_tokens_details"]["matched_tokens"] in (known, known + is_known), key


def as_key(key: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


@pytest.mark.parametrize("session_params", [None, {"id": "s"}])
async def test_a_request_id_is_its_keys_own(session_params: dict[str, str] | None) -> None:
    """A key can neither block an id for another key, nor end the request of another key with the same id."""
    body = {"text": "a", "rid": "mine"} | ({"session_params": session_params} if session_params else {})
    async with serving(api_key=KEYS) as served:
        for key in KEYS:
            await served.post("/v1/sessions", {"id": "s"}, **as_key(key))
        served.ring.held = True
        open_requests = [asyncio.ensure_future(served.post("/generate", body, **as_key(key))) for key in KEYS]
        await served.ring.until(lambda: len(served.ring.open) == 2)
        assert await served.post("/abort_request", {"rid": "mine"}, **as_key("second")) == (200, {"aborted": 1})
        status, answer = await open_requests[1]
        assert (status, answer["meta_info"]["id"]) == (200, "mine")
        assert not open_requests[0].done()
        assert await served.post("/abort_request", {"rid": "mine"}, **as_key("first")) == (200, {"aborted": 1})
        assert (await open_requests[0])[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_closing_a_session_ends_its_turn_with_api_keys_too() -> None:
    body = {"text": "a", "rid": "mine", "session_params": {"id": "s"}}
    async with serving(api_key=KEYS) as served:
        await served.post("/v1/sessions", {"id": "s"}, **as_key("first"))
        served.ring.held = True
        turn = asyncio.ensure_future(served.post("/generate", body, **as_key("first")))
        await served.ring.until(lambda: served.ring.open)
        async with served.client.delete("/v1/sessions/s", **as_key("first")) as response:
            assert response.status == 200
        status, answer = await turn
    assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")


async def test_the_owner_that_fills_the_disk_loses_sessions(tmp_path: Path) -> None:
    first, second = map(as_key, KEYS)
    async with serving(api_key=KEYS, session_dir=str(tmp_path), session_disk=2**20, max_model_len=2**20) as served:
        await served.post("/v1/sessions", {"id": "small"}, **first)
        await served.post("/v1/sessions/small/turns", {"text": "a"}, **first)
        for id in "abcdef":
            await served.post("/v1/sessions", {"id": id}, **second)
            status, _ = await served.post(
                f"/v1/sessions/{id}/turns", {"input_ids": [7] * 8000, "max_tokens": 1}, **second
            )
            assert status == 200
        left = {}
        for key, more in ((KEYS[0], first), (KEYS[1], second)):
            async with served.client.get("/v1/sessions", **more) as response:
                left[key] = [session["id"] for session in (await response.json())["data"]]
    assert left == {KEYS[0]: ["small"], KEYS[1]: list("fed")}


async def test_the_owner_that_fills_the_memory_loses_responses() -> None:
    first, second = map(as_key, KEYS)
    async with serving(api_key=KEYS, response_memory=8000) as served:
        _, answer = await served.post("/v1/responses", {"input": "a"}, **first)
        others = [(await served.post("/v1/responses", {"input": "a"}, **second))[1]["id"] for _ in range(20)]
        async with served.client.get(f"/v1/responses/{answer['id']}", **first) as response:
            assert response.status == 200
        async with served.client.get(f"/v1/responses/{others[0]}", **second) as response:
            assert response.status == 404
        assert served.responses.bytes <= 8000
