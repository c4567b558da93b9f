"""Two API keys on one server: neither can tell what the other has sent."""

import json
from typing import Any
from urllib.request import Request, urlopen

import pytest

from actors.messages import Name, Submit
from tests.api.fake_ring import Served, serving
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
KEYS = ("first", "second")
MESSAGES = [{"role": "user", "content": "a"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/sessions/s/turns": {"messages": MESSAGES},
    "/generate": {"text": "a"},
    "/generate in a session": {"text": "a", "session_params": {"id": "s"}},
}


async def salts(served: Served, path: str, body: dict[str, Any], **salt: str) -> list[str]:
    """Of what each key sends into the ring."""
    for key in KEYS:
        headers = {"Authorization": f"Bearer {key}"}
        await served.post("/v1/sessions", {"id": "s"}, headers=headers)
        status, answer = await served.post(path.partition(" ")[0], body | salt, headers=headers)
        assert status == 200, answer
    return [message.request.salt for message in served.ring.sent if isinstance(message, Submit)]


@pytest.mark.parametrize("path", REQUESTS)
async def test_what_a_key_has_sent_is_its_own(path: str) -> None:
    async with serving(api_key=KEYS) as served:
        first, second = await salts(served, path, REQUESTS[path])
        names = {message.salt for message in served.ring.sent if isinstance(message, Name)}
    assert first != second
    assert names <= {first, second}, "a session goes on from what its turns have left"


async def test_a_salt_parts_what_one_key_has_sent() -> None:
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
    """The server itself: what `matched_tokens` tells of a prompt is what the same key has sent of it."""
    code = "The code of the safe is 73914."
    with ServerProcess((*SERVE, "--api-key", "first", "--api-key", "second")) as server:
        for key, known in (("first", 0), ("second", 0), ("first", len(code) - 1)):
            body = json.dumps({"prompt": code, "max_tokens": 1}).encode()
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            with urlopen(Request(f"{server.url}/v1/completions", body, headers), timeout=60) as response:
                details = json.load(response)["usage"]["prompt_tokens_details"]
            assert details["matched_tokens"] >= known if known else details["matched_tokens"] == 0, key
