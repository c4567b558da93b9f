"""Real servers with faults: clients notice at most a pause, or get an error that names the cause."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.models.hash_definition import expected_output
from tests.api.faulty_server import ACTORS, MARK
from tests.api.hash_traffic import VOCAB, Traffic, make_checkpoint, troubles, wait_home
from tests.api.server_process import ServerProcess

pytestmark = pytest.mark.anyio
FAULTY = "tests.api.faulty_server"
SMALL = ["state_slots=8", "kv_pages=160", "page_size=4", "max_model_len=200", "step_tokens=64", "poison_freed=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("hash")
    return str(make_checkpoint(folder))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("slow")
    return str(make_checkpoint(folder, delay_ms=[10, 20]))


def generate(prompt: list[int], count: int = 5) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": count, "temperature": 0}}


@pytest.mark.parametrize("actor", ACTORS)
async def test_a_restart_is_a_pause(checkpoint: str, actor: str) -> None:
    with ServerProcess([FAULTY, actor, checkpoint, *SMALL, "max_queue=40"]) as server:
        traffic = Traffic(server.url, 6, 100, at_once=24, finish=3, stream=2, leave=1)
        await traffic.run()
        assert set(traffic.outcomes) == {"length", "leave"}
        await asyncio.to_thread(wait_home, server)
        assert server.get("/server_info")["counters"]["restarts"] == 1
    [line] = troubles(server)
    assert line["event"] == "the engine is restarted" and f"{actor} is broken" in line["exception"]


async def test_a_request_that_cannot_be_computed_fails_alone(checkpoint: str) -> None:
    with ServerProcess([FAULTY, "prompt", checkpoint, *SMALL]) as server:
        bad, good = generate([1, 2, MARK]), generate([1, 2, 3])
        async with aiohttp.ClientSession(server.url) as session:

            async def ask(stream: bool) -> tuple[int, bytes]:
                async with session.post("/generate", json=bad | {"stream": stream}) as response:
                    return response.status, await response.read()

            others = [asyncio.create_task(asyncio.to_thread(server.post, "/generate", good)) for _ in range(8)]
            whole, events = await asyncio.gather(ask(stream=False), ask(stream=True))
            for status, answer in await asyncio.gather(*others):
                assert (status, answer["output_ids"]) == (200, expected_output([1, 2, 3], 5, VOCAB))
        cause = "the model failed on this request: ValueError: no kernel for this"
        assert whole[0] == 500 and json.loads(whole[1])["error"]["message"] == cause
        event, done, _ = events[1].split(b"\n\n")
        assert (events[0], done) == (200, b"data: [DONE]")
        assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == cause
        await asyncio.to_thread(wait_home, server)
    assert troubles(server) == []


@pytest.mark.parametrize(("fault", "code", "what"), [("device", 5, "device"), ("always", 3, "engine")])
async def test_a_permanent_fault_answers_all_requests_and_ends_the_process(
    slow: str, fault: str, code: int, what: str
) -> None:
    with ServerProcess([FAULTY, fault, slow, *SMALL, "restarts=1"], exit_code=code) as server:
        bodies = [generate([1, 2, number], 150) for number in (0, 1, 2, MARK)]
        asking = [asyncio.create_task(asyncio.to_thread(server.post, "/generate", body)) for body in bodies[:-1]]
        await asyncio.to_thread(server.wait_until, lambda: server.get("/server_info")["open_requests"] == 3)
        asking.append(asyncio.create_task(asyncio.to_thread(server.post, "/generate", bodies[-1])))
        for status, answer in await asyncio.gather(*asking):
            assert (status, answer["error"]["type"]) == (500, "server_error")
            assert answer["error"]["message"] == f"the {what} failed and the server is shutting down"
        assert await asyncio.to_thread(server.wait) == code
    assert troubles(server)[-1]["event"] == "the ring failed"
