"""Engines that fail in the middle of streams: another one continues each stream, without a gap or a repeated token."""

import asyncio
import json
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import aiohttp
import pytest

from baton.models.hash_definition import expected_output
from tests.api.hash_traffic import Traffic, make_checkpoint, wait_home
from tests.api.routing.test_router import ROUTE, TEMPLATE, until
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
TOKENS = 100
STREAMS = 8
CHATS = "/v1/chat/completions"
CHAT = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("failures"), vocab_size=90, delay_ms=[8, 12])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def survivor(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, str(checkpoint), "--engine-name", "other"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def router(survivor: ServerProcess) -> Iterator[ServerProcess]:
    with ServerProcess([*ROUTE, "--engine", survivor.url]) as running:
        yield running


@pytest.fixture
def victim(router: ServerProcess, checkpoint: Path) -> Iterator[ServerProcess]:
    """Start the engine that fails, in the place of an earlier test's."""
    options = [*SERVE, str(checkpoint), "--drain-timeout", "0.2", "--engine-name", "one"]
    with ServerProcess(options) as engine:
        router.post("/debug/engines", {"url": engine.url})
        until(lambda: [each["phase"] for each in router.get("/debug/engines")] == ["ready", "ready"])
        yield engine
    delete_engine(router, engine.url)


async def has_streams(engine: ServerProcess) -> None:
    """Wait until an engine computes requests."""
    async with aiohttp.ClientSession(engine.url) as http:
        while True:
            async with http.get("/metrics") as answer:
                found = re.search(r"^baton:num_requests_running\S* (\S+)$", await answer.text(), re.MULTILINE)
            if found is not None and float(found[1]) > 0:
                return


async def read(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, which must be complete."""
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        text = (await answer.read()).decode()
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""], text[-300:]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def text_of(events: list[dict[str, Any]]) -> str:
    """Return the text of a chat's stream. Its events must belong together, and count every token once."""
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    assert events[-1]["usage"]["completion_tokens"] == TOKENS
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert sum("role" in delta for delta in deltas) == 1
    return "".join(delta.get("content") or "" for delta in deltas)


async def read_messages(url: str, number: int) -> tuple[str, list[str]]:
    """Return the text of a stream of Messages, and the kinds of its other events. Every token must be counted once."""
    body = {"model": "default", "messages": [{"role": "user", "content": f"{number}," * 9}], "max_tokens": TOKENS}
    body |= {"temperature": 0, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/messages", json=body) as answer:
        assert answer.status == 200, await answer.text()
        lines = (await answer.read()).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[-2]["usage"]["output_tokens"] == TOKENS, events[-2:]
    kinds = [event["type"] for event in events if event["type"] not in ("ping", "content_block_delta")]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop") and len(set(kinds)) == len(kinds)
    deltas = (event["delta"] for event in events if event["type"] == "content_block_delta")
    return "".join(delta["text"] for delta in deltas), kinds


async def read_response(url: str, number: int) -> tuple[str, dict[str, Any]]:
    """Return the text of a stream of Responses, and the response at its end. No event may be missing or be repeated."""
    body = {"input": f"{number}," * 9, "max_output_tokens": TOKENS, "temperature": 0, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/responses", json=body) as answer:
        assert answer.status == 200, await answer.text()
        lines = (await answer.read()).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["id"], first["created_at"]) == (last["id"], last["created_at"])
    [message] = last["output"]
    assert {event["item_id"] for event in events if "item_id" in event} == {message["id"]}
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert message["content"][0]["text"] == text and last["usage"]["output_tokens"] == TOKENS
    return text, last


async def check_found(url: str, response: dict[str, Any]) -> None:
    """Check that a stored response, after its engine has failed, can be read and continued."""
    path = f"{url}/v1/responses/{response['id']}"
    async with aiohttp.ClientSession() as http:
        async with http.get(path) as answer:
            assert (answer.status, await answer.json()) == (200, response)
        async with http.get(path, params={"stream": "true"}) as answer:
            numbers = re.findall(rb'"sequence_number":(\d+)', await answer.read())
            assert [*map(int, numbers)] == [*range(len(numbers))]
        body = {"input": "on", "max_output_tokens": 1, "previous_response_id": response["id"]}
        async with http.post(f"{url}/v1/responses", json=body) as answer:
            assert answer.status == 200, await answer.text()


def chat(number: int, **fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [{"role": "user", "content": f"{number}," * 9}], "seed": number} | fields


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_another_engine_continues_the_streams(
    router: ServerProcess, survivor: ServerProcess, victim: ServerProcess, how: signal.Signals
) -> None:
    bodies = [chat(number, temperature=number % 2) for number in range(STREAMS)]
    url, logged = survivor.url, len(router.log)
    streams = [asyncio.ensure_future(read(router.url, CHATS, body)) for body in bodies]
    messages = [asyncio.ensure_future(read_messages(router.url, number)) for number in range(STREAMS // 2)]
    responses = [asyncio.ensure_future(read_response(router.url, number)) for number in range(STREAMS // 2)]
    await has_streams(victim)
    await asyncio.sleep(random.uniform(0.1, 0.4))
    victim.process.send_signal(how)
    try:
        async with asyncio.timeout(20):
            found = [text_of(events) for events in await asyncio.gather(*streams)]
            found_messages = await asyncio.gather(*messages)
            found_responses = await asyncio.gather(*responses)
    finally:
        victim.process.send_signal(signal.SIGCONT)
        if how is signal.SIGKILL:
            victim.kill_now()
    continued = [line for line in router.log[logged:] if line["event"] == "another engine continues a stream"]
    assert continued, "the engine had none of the streams"
    expected = await asyncio.gather(*(read(url, CHATS, body) for body in bodies))
    assert found == [text_of(events) for events in expected]
    assert all(len(text) == TOKENS for text in found)
    lengths = {len(text) for text, _ in found_messages}
    assert found_messages == await asyncio.gather(*(read_messages(url, number) for number in range(STREAMS // 2)))
    assert lengths == {TOKENS}
    for number, (text, response) in enumerate(found_responses):
        assert text == (await read_response(url, number))[0]
        await check_found(router.url, response)


async def test_what_the_client_left_to_chance_is_continued_too(router: ServerProcess, victim: ServerProcess) -> None:
    """The seed is the first engine's: a stream without a seed is no other stream after it."""
    body = {"prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 1, "n": 2}
    streams = [asyncio.ensure_future(read(router.url, "/v1/completions", body)) for _ in range(4)]
    await asyncio.sleep(0.5)
    victim.kill_now()
    for events in await asyncio.gather(*streams):
        for index in (0, 1):
            parts = [event["choices"][0] for event in events if event["choices"]]
            assert len("".join(part["text"] for part in parts if part["index"] == index)) == TOKENS


def delete_engine(router: ServerProcess, url: str) -> None:
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{router.url}/debug/engines", json.dumps({"url": url}).encode(), headers, method="DELETE")):
        pass


async def test_a_stream_with_an_id_of_the_clients_is_continued(router: ServerProcess, victim: ServerProcess) -> None:
    params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    bodies = [{"input_ids": [n, 1, 2], "rid": f"r{n}", "sampling_params": params, "stream": True} for n in range(4)]
    streams = [asyncio.ensure_future(read(router.url, "/generate", body)) for body in bodies]
    await asyncio.sleep(0.5)
    victim.kill_now()
    for body, events in zip(bodies, await asyncio.gather(*streams), strict=True):
        assert events[-1]["output_ids"] == expected_output(body["input_ids"], TOKENS, 90)


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_fifty_failures_under_load(tmp_path: Path, how: signal.Signals) -> None:
    """Three engines answer traffic, of which one after the other is killed and replaced, or stopped and continued."""
    folder, chance = make_checkpoint(tmp_path, delay_ms=[2, 6]), random.Random(0)
    with ExitStack() as stack:
        engines = [stack.enter_context(ServerProcess([*SERVE, str(folder)])) for _ in range(3)]
        arguments = [part for engine in engines for part in ("--engine", engine.url)]
        router = stack.enter_context(ServerProcess([*ROUTE, *arguments]))
        until(lambda: all(engine["phase"] == "ready" for engine in router.get("/debug/engines")))
        outcomes, over = Counter[str](), asyncio.Event()

        async def send() -> None:
            while not over.is_set():
                traffic = Traffic(
                    router.url, chance.randrange(999), requests=200, at_once=24, finish=1, stream=2, leave=1
                )
                await traffic.run()
                outcomes.update(traffic.outcomes)

        sending = asyncio.ensure_future(send())
        for _ in range(50):
            await asyncio.sleep(chance.uniform(0.3, 1.0))
            victim = chance.randrange(3)
            if how is signal.SIGSTOP:
                engines[victim].process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(3)
                engines[victim].process.send_signal(signal.SIGCONT)
            else:
                engines[victim].kill_now()
                await asyncio.to_thread(delete_engine, router, engines[victim].url)
                engines[victim] = await asyncio.to_thread(stack.enter_context, ServerProcess([*SERVE, str(folder)]))
                await asyncio.to_thread(router.post, "/debug/engines", {"url": engines[victim].url})
        over.set()
        await sending
        assert outcomes.keys() == {"length", "leave"}, outcomes
        for engine in engines:
            wait_home(engine)
