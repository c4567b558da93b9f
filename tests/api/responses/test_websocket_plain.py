"""The client of the library `websockets`: many chats at once on a real server, pings, a slow reader."""

import asyncio
import json
import random
from pathlib import Path
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET, socket as Socket
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from baton.api.generation.outputs import MERGE_ABOVE
from baton.api.responses.websocket import OPEN_SOCKETS
from baton.models.hash_definition import expected_output
from tests.api.fake_ring import serving
from tests.api.hash_traffic import make_checkpoint, troubles, wait_home
from tests.api.server_process import SERVE, ServerProcess
from tests.api.through_router import not_through_router

pytestmark = pytest.mark.anyio

CHATS, TURNS = 200, 3
LETTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)]  # a letter's index is its token
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
POOLS = ["--state-slots", "40", "--kv-pages", "1000", "--page-size", "8", "--max-running", "16"]
ENDS = ("error", "response.completed", "response.incomplete", "response.failed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a hash model whose tokens are visible letters."""
    folder = make_checkpoint(tmp_path_factory.mktemp("hash"), vocab_size=len(LETTERS))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def expected_text(prompt: str, count: int) -> str:
    ids = expected_output([LETTERS.index(letter) for letter in prompt], count, len(LETTERS))
    return "".join(LETTERS[id] for id in ids)


async def create(socket: ClientConnection, **body: Any) -> list[Any]:
    """Create a response over the websocket; return its events, or one error event."""
    await socket.send(json.dumps({"type": "response.create", "temperature": 0, **body}))
    events = []
    while True:
        events.append(json.loads(await socket.recv()))
        if events[-1]["type"] in ENDS:
            return events


def deltas_of(events: list[Any]) -> list[str]:
    return [event["delta"] for event in events if event["type"] == "response.output_text.delta"]


async def chat(server: ServerProcess, number: int) -> int:
    """Run all turns of a chat, check every letter of the answers, and return how many prompt tokens were cached."""
    chance, whole, cached = random.Random(number), "", 0
    _, session = await asyncio.to_thread(server.post, "/v1/sessions", {})
    async with connect(f"ws{server.url.removeprefix('http')}/v1/responses", open_timeout=60) as socket:
        for turn in range(1, TURNS + 1):
            text, count = "".join(chance.choices(LETTERS, k=chance.randint(1, 12))), chance.randint(1, 16)
            events = await create(socket, input=text, max_output_tokens=count, conversation=session["id"])
            response = events[-1]["response"]
            whole += f"user:{text};assistant:"
            answer = expected_text(whole, count)
            assert "".join(deltas_of(events)) == response["output"][0]["content"][0]["text"] == answer, (number, turn)
            assert (response["conversation"], response["turn"]) == ({"id": session["id"]}, turn)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert response["usage"]["input_tokens"] == len(whole)
            cached += response["usage"]["input_tokens_details"]["cached_tokens"]
            whole += f"{answer};"
    return cached


async def test_two_hundred_chats_each_in_its_own_conversation(checkpoint: Path) -> None:
    with ServerProcess([*SERVE, str(checkpoint), *POOLS]) as server:
        async with asyncio.TaskGroup() as tasks:
            chats = [tasks.create_task(chat(server, number)) for number in range(CHATS)]
        assert sum(chat.result() for chat in chats) > 0
        await asyncio.to_thread(wait_home, server)
    assert troubles(server) == []


async def test_pings_go_both_ways() -> None:
    async with serving(ping_interval=0.05) as served:
        served.ring.pause = 0.1  # The answer takes longer than the server waits for pongs.
        async with connect(f"{served.url.replace('http', 'ws')}v1/responses", ping_interval=None) as socket:
            waiter = await socket.ping()
            async with asyncio.timeout(5):
                assert await waiter >= 0
            events = await create(socket, input="a")
            assert events[-1]["type"] == "response.completed"


@not_through_router
async def test_a_slow_reader_gets_longer_deltas() -> None:
    async with serving(max_model_len=200_000) as served:
        served.ring.reply = "x" * 5_000
        sock = Socket()
        sock.setsockopt(SOL_SOCKET, SO_RCVBUF, 8192)
        sock.setblocking(False)
        url = served.client.make_url("/v1/responses").with_scheme("ws")
        await asyncio.get_running_loop().sock_connect(sock, (url.host, url.port))
        async with connect(str(url), sock=sock, max_queue=1, compression=None) as socket:
            [at_server] = served.client.app[OPEN_SOCKETS]
            at_server.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, 8192)
            await socket.send(json.dumps({"type": "response.create", "input": "a"}))
            await served.ring.until(lambda: served.ring.open)
            for _ in range(3000):
                if not served.ring.open:
                    break
                await asyncio.sleep(0.01)
            events = [json.loads(await socket.recv())]
            while events[-1]["type"] not in ENDS:
                events.append(json.loads(await socket.recv()))
    assert "".join(deltas_of(events)) == served.ring.reply
    assert max(map(len, deltas_of(events))) > MERGE_ABOVE
