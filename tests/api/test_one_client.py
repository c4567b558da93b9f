"""No client can make others wait long, whatever it sends: a real server, whose health is polled meanwhile."""

import asyncio
import io
import json
import time
from typing import Any

import aiohttp
import pytest

from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "a"}
# Each request in HOSTILE once blocked all other clients for 0.5 to 24 s. On a quiet machine none now blocks for 0.15 s.
LONGEST_WAIT_S = 0.6
HOSTILE: dict[str, tuple[str, dict[str, Any], int]] = {
    "a long prompt": ("/v1/completions", {"prompt": "a" * 4_000_000}, 400),
    "a long text to tokenize": ("/tokenize", {"prompt": "ab c" * 3_900_000}, 400),
    "a text that just fits": ("/tokenize", {"prompt": "a" * 100_000}, 200),
    "many messages": ("/v1/chat/completions", {"messages": [{**USER, "content": ""}] * 100_000}, 400),
    "many items": ("/v1/responses", {"input": [USER] * 100_000}, 400),
    "many template arguments": (
        "/v1/chat/completions",
        {"messages": [USER], "chat_template_kwargs": {f"k{index}": index for index in range(200_000)}},
        400,
    ),
    "many token ids": ("/v1/completions", {"prompt": [1] * 2_000_000}, 400),
    "many ids to text": ("/detokenize", {"tokens": [97] * 3_000_000}, 200),
    "many prompts": ("/generate", {"text": ["a"] * 100_000}, 400),
    "many completions": ("/v1/completions", {"prompt": ["a"] * 100_000}, 400),
    "many stop strings": ("/v1/completions", {"prompt": "a", "stop": ["x" * 1000] * 10_000}, 400),
}


async def test_no_other_client_waits() -> None:
    with ServerProcess() as server:
        async with aiohttp.ClientSession() as hostile, aiohttp.ClientSession() as other:
            for name, (path, body, status) in HOSTILE.items():
                data = json.dumps(body).encode()
                headers = {"Content-Type": "application/json"}
                asking = asyncio.ensure_future(longest_wait(other, server.url + "/health"))
                async with hostile.post(server.url + path, data=io.BytesIO(data), headers=headers) as response:
                    await response.read()
                    assert response.status == status, name
                asking.cancel()
                assert await asking < LONGEST_WAIT_S, name


async def test_a_batch_does_not_keep_others_from_rows() -> None:
    """48 sequences of one call compete for 4 rows; another call gets its token in between."""
    batch = {"prompt": ["a"] * 48, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with ServerProcess((*SERVE, "--max-running", "4")) as server:
        async with aiohttp.ClientSession(server.url) as client, client.post("/v1/completions", json=batch) as answer:
            await answer.content.readline()
            assert await waiting_behind_one_token(client) > 40


async def test_a_busy_key_does_not_keep_others_from_rows() -> None:
    """48 calls of one key compete for 4 rows; a call of another key gets its token in between."""
    long = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with ServerProcess((*SERVE, "--max-running", "4", "--api-key", "one", "--api-key", "two"), key="one") as server:
        async with (
            aiohttp.ClientSession(server.url, headers=first) as greedy,
            aiohttp.ClientSession(server.url, headers=second) as other,
            asyncio.TaskGroup() as tasks,
        ):
            calls = [tasks.create_task(greedy.post("/v1/completions", json=long)) for _ in range(48)]
            await until_waiting(other, 40)
            assert await waiting_behind_one_token(other) > 36
            for call in calls:
                call.cancel()


async def waiting_behind_one_token(client: aiohttp.ClientSession) -> int:
    """Get one token for this client, and return how many requests still wait at that moment."""
    async with client.post("/v1/completions", json={"prompt": "b", "max_tokens": 1}) as answer:
        assert answer.status == 200
        await answer.read()
    return await waiting(client)


async def until_waiting(client: aiohttp.ClientSession, requests: int) -> None:
    async with asyncio.timeout(30):
        while True:
            if await waiting(client) >= requests:
                return
            await asyncio.sleep(0.01)


async def waiting(client: aiohttp.ClientSession) -> int:
    async with client.get("/server_info") as answer:
        return int((await answer.json())["gauges"]["waiting"])


async def longest_wait(client: aiohttp.ClientSession, url: str) -> float:
    """Poll the URL until cancelled, and return the longest wait in seconds."""
    longest = 0.0
    try:
        while True:
            began = time.perf_counter()
            async with client.get(url) as response:
                await response.read()
            longest = max(longest, time.perf_counter() - began)
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        return max(longest, time.perf_counter() - began)
