"""A real router in front of two real engines with the hash model, whose every token is known."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.models.hash_definition import expected_output
from tests.api.hash_traffic import VOCAB, make_checkpoint
from tests.api.server_process import SERVE, ServerProcess

ROUTE = ("baton.api.cli", "route", "--port", "0", "--log-format", "json")
TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }};{% endfor %}"
SOON_S = 10.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("router"), delay_ms=[2, 2])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> Iterator[list[ServerProcess]]:
    options = [*SERVE, str(checkpoint), "--pooling", "last"]
    one, other = ([*options, "--engine-name", name] for name in ("one", "other"))
    with ServerProcess(one) as first, ServerProcess(other) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def router(engines: list[ServerProcess]) -> Iterator[ServerProcess]:
    arguments = [part for engine in engines for part in ("--engine", engine.url)]
    with ServerProcess([*ROUTE, *arguments]) as running:
        until(lambda: all(engine["phase"] == "ready" for engine in running.get("/debug/engines")))
        yield running


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def generate(server: ServerProcess, tokens: list[int], count: int = 8) -> dict[str, Any]:
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    assert answer["output_ids"] == expected_output(tokens, count, VOCAB)
    return answer  # type: ignore[no-any-return]


def chat(server: ServerProcess, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int]:
    """Return the answer, and how many tokens of the prompt came out of a cache."""
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/chat/completions", body | fields)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached


def answers_of(engines: list[ServerProcess], endpoint: str) -> list[int]:
    """Return how many requests of an endpoint each engine has answered."""
    return [sum(line.get("endpoint") == endpoint for line in engine.log) for engine in engines]


def test_requests_are_spread_over_the_engines(router: ServerProcess, engines: list[ServerProcess]) -> None:
    before = answers_of(engines, "POST /generate")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda start: generate(router, list(range(start, start + 40)), 50), range(8)))
    until(lambda: sum(answers_of(engines, "POST /generate")) == sum(before) + 8)
    assert all(now > then for now, then in zip(answers_of(engines, "POST /generate"), before, strict=True))


def test_a_chat_stays_where_its_state_is(router: ServerProcess) -> None:
    for letter in "abcdef":
        messages = [{"role": "user", "content": letter * 50}]
        for _ in range(3):
            text, _ = chat(router, messages)
            time.sleep(0.2)  # until the engine has reported the state
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        assert chat(router, messages)[1] > 80


def test_a_stream_is_passed_on_as_it_is(router: ServerProcess, engines: list[ServerProcess]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "temperature": 0, "stream": True}
    texts = []
    for server in (router, engines[0]):
        data = json.dumps(body | {"ignore_eos": True}).encode()
        with urlopen(
            Request(f"{server.url}/v1/chat/completions", data, {"Content-Type": "application/json"})
        ) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            frames = answer.read().decode().split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""] and all(frame.startswith("data: ") for frame in frames[:-1])
        chunks = [json.loads(frame[6:]) for frame in frames[:-2]]
        texts.append("".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]))
    assert texts[0] == texts[1] != ""


def test_sessions_stay_with_their_engine(router: ServerProcess, engines: list[ServerProcess]) -> None:
    ids = []
    for _ in range(4):
        status, session = router.post("/v1/sessions", {})
        assert status == 200
        ids.append(session["id"])
        for turn in range(3):
            body = {"input": f"turn {turn}", "conversation": session["id"], "max_output_tokens": 4, "temperature": 0}
            status, answer = router.post("/v1/responses", body)
            assert status == 200, answer
        assert len(router.get(f"/v1/sessions/{session['id']}")["turns"]) == 3
    held = [{each["id"] for each in engine.get("/v1/sessions")["data"]} & {*ids} for engine in engines]
    assert held[0] | held[1] == {*ids} and not held[0] & held[1] and all(held)
    assert {each["id"] for each in router.get("/v1/sessions")["data"]} >= {*ids}


def test_a_response_continues_one_that_another_engine_would_not_know(router: ServerProcess) -> None:
    for letter in "abcd":
        previous = None
        for _ in range(3):
            body = {"input": letter * 20, "max_output_tokens": 4, "previous_response_id": previous}
            status, answer = router.post("/v1/responses", body)
            assert status == 200, answer
            previous = answer["id"]
        assert router.get(f"/v1/responses/{previous}")["id"] == previous


def test_embeddings_are_those_of_an_engine(router: ServerProcess, engines: list[ServerProcess]) -> None:
    body = {"model": "default", "input": [[1, 2, 3], [4, 5], [1, 2, 3, 4]], "encoding_format": "float"}
    found, expected = router.post("/v1/embeddings", body), engines[0].post("/v1/embeddings", body)
    assert found[0] == expected[0] == 200
    assert found[1]["data"] == expected[1]["data"] and len(found[1]["data"]) == 3
    status, answer = router.post("/v1/embeddings", body | {"dimensions": 0})
    assert status == 400 and answer["error"]["param"] == "dimensions"


def test_an_unknown_id_is_refused_as_an_engine_refuses_it(router: ServerProcess) -> None:
    assert router.status("/v1/sessions/nothing") == router.status("/v1/responses/nothing") == 404
    status, answer = router.post("/v1/responses", {"input": "a", "previous_response_id": "resp_nothing"})
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/chat/completions", {"messages": []}, 400), ("/v1/nothing", {}, 404), ("/v1/chat/completions", [], 400)],
)
def test_errors_are_passed_on(
    router: ServerProcess, engines: list[ServerProcess], path: str, body: Any, status: int
) -> None:
    found, error = router.post(path, body)
    assert found == status and error == engines[0].post(path, body)[1]


@pytest.mark.anyio
async def test_a_websocket_continues_responses_wherever_they_are(router: ServerProcess) -> None:
    previous = []
    for letter in "abcd":
        status, answer = router.post("/v1/responses", {"input": letter * 30, "max_output_tokens": 4})
        assert status == 200
        previous.append(answer["id"])
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{router.url}/v1/responses") as socket:
        for id in previous:
            event = {"type": "response.create", "input": "more", "previous_response_id": id, "max_output_tokens": 4}
            await socket.send_json(event)
            while (message := await socket.receive_json(timeout=SOON_S))["type"] != "response.incomplete":
                assert message["type"] != "error", message
            assert message["response"]["previous_response_id"] == id


@pytest.mark.anyio
async def test_a_text_that_looks_like_the_engines_comment_is_passed_on(router: ServerProcess) -> None:
    """A response that runs in the background cannot be continued, so its stream is passed on without a copy."""
    body = {"input": "Hello", "instructions": "Note: places matter.", "max_output_tokens": 3, "background": True}
    url = f"{router.url}/v1/responses"
    async with (
        asyncio.timeout(SOON_S),
        aiohttp.ClientSession() as http,
        http.post(url, json=body | {"stream": True}) as answer,
    ):
        lines = (await answer.text()).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events and events[0]["response"]["instructions"] == body["instructions"]
    assert events[-1]["type"] == "response.incomplete"
    assert not [line for line in lines if line.startswith(": places")]


@pytest.mark.anyio
async def test_messages_of_a_websocket_count_until_their_engine_has_them(engines: list[ServerProcess]) -> None:
    """They are more bytes than --bytes-in-flight, one after another. A message that is not UTF-8 gets an error."""
    limits = ["--body-limit", "1M", "--bytes-in-flight", "2M"]
    body = {"type": "response.create", "input": "a", "max_output_tokens": 1, "metadata": {"a": "x" * 500}}
    with ServerProcess([*ROUTE, "--engine", engines[0].url, *limits]) as router:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{router.url}/v1/responses") as socket:
            for number in range(6):
                await socket.ping()
                await socket.send_str(json.dumps(body) + " " * 900_000)
                while (event := await socket.receive_json(timeout=SOON_S))["type"] != "response.incomplete":
                    assert event["type"] != "error", (number, event)
            for wrong in (b"\xff", b"{", b"[]", b'{"type": "response.create", "stream_id": 7}'):
                await socket.send_bytes(wrong)
                event = await socket.receive_json(timeout=SOON_S)
                assert (event["type"], event["status"]) == ("error", 400), (wrong, event)


@pytest.mark.anyio
async def test_a_message_that_no_engine_could_read_ends_no_response(checkpoint: Path) -> None:
    """The client learns that the engine of a running response is lost, although it has sent nonsense meanwhile."""
    body = {"type": "response.create", "input": "a", "max_output_tokens": 10_000, "ignore_eos": True}
    with ServerProcess([*SERVE, str(checkpoint)]) as engine, ServerProcess([*ROUTE, "--engine", engine.url]) as router:
        until(lambda: router.status("/ready") == 200)
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{router.url}/v1/responses") as socket:
            await socket.send_json(body)
            await socket.receive_json(timeout=SOON_S)
            await socket.send_str("nonsense")
            while (event := await socket.receive_json(timeout=SOON_S))["type"] != "error":
                pass
            assert event["status"] == 400
            engine.kill_now()
            while (event := await socket.receive_json(timeout=SOON_S))["type"] != "error":
                pass
            assert event["error"]["code"] == "engine_lost"


@pytest.mark.anyio
async def test_a_wrong_handshake_leaves_the_connection_usable(router: ServerProcess) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as http:
        async with http.get(f"{router.url}/v1/responses", headers={"Upgrade": "websocket"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (426, "upgrade_required")
        async with http.post(f"{router.url}/generate", json={"input_ids": [1]}) as answer:
            assert answer.status == 200


def test_metrics_name_the_engine(router: ServerProcess, engines: list[ServerProcess]) -> None:
    generate(router, [1, 2, 3])
    with urlopen(f"{router.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    names = {engine["name"] for engine in router.get("/debug/engines")}
    assert len(names) == 2 and all(any(f'engine="{name}"' in line for line in lines) for name in names)
    assert len([line for line in lines if line.startswith("# TYPE baton:num_requests_running ")]) <= 1


def test_metrics_have_the_sums_over_all_engines(router: ServerProcess) -> None:
    generate(router, [1, 2, 3])
    with urlopen(f"{router.url}/metrics") as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    for name in ("generation_tokens", "slots", "time_to_first_token_seconds"):
        summed, each = (
            sum(sample.value for sample in families[f"baton:{prefix}{name}"].samples if "_created" not in sample.name)
            for prefix in ("all_engines_", "")
        )
        assert summed == pytest.approx(each) and summed > 0
        assert all("engine" not in sample.labels for sample in families[f"baton:all_engines_{name}"].samples)
    assert "baton:all_engines_state_chance" not in families and "baton:state_chance" in families


def test_the_slots_of_all_engines_are_listed(router: ServerProcess, engines: list[ServerProcess]) -> None:
    _, session = router.post("/v1/sessions", {})
    status, answer = router.post(f"/v1/sessions/{session['id']}/turns", {"text": "abc", "max_tokens": 4})
    assert status == 200, answer
    slots = router.get(f"/debug/slots?session={session['id']}")
    one, other = (len(engine.get("/debug/slots")) for engine in engines)
    assert [slot["engine_name"] for slot in slots] == ["one"] * one + ["other"] * other
    marked = {slot["engine_name"] for slot in slots if slot.get("session") == session["id"]}
    assert len(marked) == 1
    assert router.get("/debug/peers") == []


def test_engines_are_lost_and_join(checkpoint: Path, engines: list[ServerProcess]) -> None:
    with ServerProcess([*ROUTE, "--engine", "http://127.0.0.1:1"], wait_ready=False) as router:
        assert router.status("/ready") == 503 and router.status("/health") == 200
        status, error = router.post("/generate", {"input_ids": [1]})
        assert (status, error["error"]["code"]) == (503, "no_engine")
        with ServerProcess([*SERVE, str(checkpoint)]) as engine:
            for url in (engine.url, engines[0].url):
                assert router.post("/debug/engines", {"url": url})[0] == 200
            until(lambda: sum(view["phase"] == "ready" for view in router.get("/debug/engines")) == 2)
            for start in range(4):
                generate(router, list(range(start, start + 40)))
            engine.kill_now()
            for start in range(20):
                generate(router, list(range(start, start + 40)))
        until(lambda: sum(view["phase"] == "lost" for view in router.get("/debug/engines")) == 2)
        assert router.status("/ready") == 200


def test_both_need_the_same_keys_and_only_the_first_changes_the_engines(checkpoint: Path) -> None:
    keys = ["--api-key", "operators-key", "--api-key", "tenants-key"]
    with ServerProcess([*SERVE, str(checkpoint), *keys], key="operators-key") as engine:
        for key, status in (("operators-key", 200), ("tenants-key", 403)):
            with ServerProcess([*ROUTE, "--engine", engine.url, *keys], key=key) as router:
                generate(router, [1, 2, 3])
                assert router.post("/debug/engines", {"url": engine.url})[0] == status
                assert router.status("/v1/models") == 401
