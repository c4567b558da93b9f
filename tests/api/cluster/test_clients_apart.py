"""Clients in front of a router, two prefill and two decode engines: the answers of one engine, and of no other."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from tests.api.cluster.test_cluster import ClusterProcess
from tests.api.server_process import SERVE, ServerProcess

FILE = """
[options]
memory = "64M"
[engines.prefill]
replicas = 2
options = {role = "prefill"}
[engines.decode]
replicas = 2
options = {role = "decode"}
"""
HISTORY: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant. " * 20},
    {"role": "user", "content": "My name is Clara."},
    {"role": "assistant", "content": "Nice to meet you, Clara."},
    {"role": "user", "content": "What is my name?"},
]


@pytest.fixture(scope="module")
def one() -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, "--memory", "64M"]) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    folder: Path = tmp_path_factory.mktemp("apart")
    (folder / "cluster.toml").write_text(FILE)
    with ClusterProcess(folder) as running:
        running.wait_until(lambda: running.phases() == ["ready"] * 4)
        yield running


def chats(url: str) -> list[str]:
    """Return the answers of OpenAI's client: complete, streamed, and as a chain of responses."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 24}
        whole = client.chat.completions.create(messages=HISTORY, **options).choices[0].message.content
        chunks = client.chat.completions.create(messages=HISTORY, stream=True, **options)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        first = client.responses.create(model="default", input="My name is Clara.", temperature=0)
        second = client.responses.create(
            model="default", input="What is my name?", previous_response_id=first.id, temperature=0
        )
        return [whole or "", streamed, first.output_text, second.output_text]


def messages(url: str) -> list[str]:
    """Return the answers of Anthropic's client: complete and streamed."""
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": "default", "max_tokens": 24, "extra_body": {"temperature": 0}}
        system, *turns = HISTORY
        options |= {"system": system["content"], "messages": turns}
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            streamed = stream.get_final_text()
        return [block.text for block in whole.content if block.type == "text"] + [streamed]


def generated(server: ServerProcess) -> list[Any]:
    """Return the tokens of /generate, and of three turns of one of SGLang's sessions."""
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    prompt = list(range(20, 220))
    found = [server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})[1]["output_ids"]]
    status, session = server.post("/open_session", {"capacity_of_str_len": 1000})
    assert status == 200
    rid = None
    for turn in range(3):
        params = {"id": session, "rid": rid}
        body = {"input_ids": prompt[turn::3], "session_params": params, "sampling_params": sampling}
        status, answer = server.post("/generate", body)
        assert status == 200, answer
        rid = answer["meta_info"]["id"]
        found.append(answer["output_ids"])
    return found


async def conversed(url: str) -> list[str]:
    """Return the answers of a conversation over a websocket."""
    texts, previous = [], None
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/v1/responses") as socket:
        for question in ("My name is Clara.", "What is my name?"):
            event = {"type": "response.create", "input": question, "temperature": 0, "previous_response_id": previous}
            await socket.send_json(event)
            while (message := await socket.receive_json(timeout=60))["type"] != "response.completed":
                assert message["type"] != "error", message
            previous = message["response"]["id"]
            texts.append(message["response"]["output"][0]["content"][0]["text"])
    return texts


def test_the_answers_are_those_of_one_engine(cluster: ClusterProcess, one: ServerProcess) -> None:
    assert chats(cluster.url) == chats(one.url)
    assert messages(cluster.url) == messages(one.url)
    assert generated(cluster) == generated(one)
    assert asyncio.run(conversed(cluster.url)) == asyncio.run(conversed(one.url)) != []
    engines = {engine["name"]: engine for engine in cluster.get("/debug/engines")}
    assert all(engines[f"decode-{number}"]["requests"] for number in (0, 1))
    assert not any(engines[f"prefill-{number}"]["requests"] for number in (0, 1))
