"""The bundled model in a real server process: the openai client, raw events, errors, and sensible answers."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.api.fake_ring import payloads
from tests.api.server_process import SERVE, ServerProcess

MEMORY = "256M"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, "--memory", MEMORY]) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def model_of(client: openai.OpenAI) -> str:
    [model] = client.models.list().data
    return model.id


def test_chat_and_stream_agree(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": model_of(client),
        "messages": [{"role": "user", "content": "What is 12 plus 7?"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content and text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert "19" in text


def test_a_name_from_two_turns_ago(client: openai.OpenAI) -> None:
    messages: list[Any] = []
    cached = []
    for text in ("My name is Clara.", "What is 3 plus 4?", "What is my name?"):
        messages.append({"role": "user", "content": text})
        answer = client.chat.completions.create(model=model_of(client), messages=messages, temperature=0, max_tokens=40)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert "Clara" in messages[-1]["content"]
    assert cached[0] == 0 and cached[1] > 0 and cached[2] > cached[1]


def test_completions(client: openai.OpenAI) -> None:
    fields: Any = {"model": model_of(client), "prompt": ["one", "two"], "max_tokens": 8, "temperature": 1, "seed": 3}
    first = client.completions.create(**fields, n=2, extra_body={"ignore_eos": True})
    again = client.completions.create(**fields, n=2, extra_body={"ignore_eos": True})
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert first.usage is not None and first.usage.completion_tokens == 32


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model_of(client),
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content) == 5
    for token in answer.choices[0].logprobs.content:
        alternatives = [top.logprob for top in token.top_logprobs]
        assert len(alternatives) == 3 and alternatives == sorted(alternatives, reverse=True)
        assert token.logprob == alternatives[0] <= 0


def test_prompt_scores_agree_with_those_of_the_output(server: ServerProcess) -> None:
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"text": "My name is", "return_logprob": True, "sampling_params": params}
    _, generated = server.post("/generate", body)
    _, prompt = server.post("/tokenize", {"prompt": "My name is"})
    ids = prompt["tokens"] + generated["output_ids"]
    scoring = {"input_ids": ids, "return_logprob": True, "logprob_start_len": len(prompt["tokens"])}
    _, scored = server.post("/generate", {**scoring, "sampling_params": {"max_new_tokens": 0}})
    drawn = generated["meta_info"]["output_token_logprobs"]
    scored_rows = scored["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in scored_rows] == [row[1] for row in drawn] == generated["output_ids"]
    assert [row[0] for row in scored_rows] == pytest.approx([row[0] for row in drawn], abs=1e-3)


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[Any]:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type", "").startswith("text/event-stream")
    chunks = payloads(response.read().removesuffix(b"\n\n").split(b"\n\n"))
    connection.close()
    return chunks


def test_raw_events(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10}
    chunks = events(server, "/v1/chat/completions", body)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


ASKED = "What is 12 plus 7?"


def chat(server: ServerProcess, **fields: Any) -> tuple[str, Any]:
    """Return text and stop_reason of an answer; check that a stream has the same text, and all log probabilities."""
    body = {"messages": [{"role": "user", "content": ASKED}], "temperature": 0, "logprobs": True, **fields}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    [choice] = answer["choices"]
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    choices = [chunk["choices"][0] for chunk in events(server, "/v1/chat/completions", body)]
    assert "".join(each["delta"].get("content") or "" for each in choices) == choice["message"]["content"]
    assert choices[-1]["stop_reason"] == choice["stop_reason"]
    streamed = [item for each in choices if each["logprobs"] for item in each["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]
    return choice["message"]["content"], choice["stop_reason"]


def test_a_stop_string_may_stay_in_an_answers_text(server: ServerProcess) -> None:
    plain, end = chat(server)
    marker = server.post("/detokenize", {"tokens": [end]})[1]["text"]
    visible = {"skip_special_tokens": False}
    assert plain and marker.startswith("<") and chat(server, **visible)[0] == plain
    assert chat(server, include_stop_str_in_output=True) == (plain, end)
    assert chat(server, include_stop_str_in_output=True, **visible) == (plain + marker, end)
    last = plain[-1]
    token = server.post("/tokenize", {"prompt": last, "add_special_tokens": False})[1]["tokens"][0]
    before = plain[: plain.index(last)]
    for stop, reason in (({"stop": last}, last), ({"stop_token_ids": [token]}, token)):
        assert chat(server, **stop) == (before, reason)
        assert chat(server, **stop, include_stop_str_in_output=True) == (before + last, reason)


def test_a_stop_string_may_stay_in_a_completions_text(server: ServerProcess) -> None:
    _, prompt = server.post("/tokenize", {"messages": [{"role": "user", "content": ASKED}]})
    plain, end = chat(server)
    marker = server.post("/detokenize", {"tokens": [end]})[1]["text"]
    body = {"prompt": prompt["tokens"], "temperature": 0, "max_tokens": 40, "skip_special_tokens": False, "logprobs": 0}
    for keep, right in ((False, plain), (True, plain + marker)):
        fields = {**body, "include_stop_str_in_output": keep}
        [choice] = server.post("/v1/completions", fields)[1]["choices"]
        assert choice["text"] == right and "".join(choice["logprobs"]["tokens"]) == plain + marker
        assert "".join(chunk["choices"][0]["text"] for chunk in events(server, "/v1/completions", fields)) == right
        params = {"temperature": 0, "max_new_tokens": 40, "skip_special_tokens": False, "no_stop_trim": keep}
        own = {"input_ids": prompt["tokens"], "sampling_params": params, "return_logprob": True}
        own["return_text_in_logprobs"] = True
        answers = [server.post("/generate", own)[1], events(server, "/generate", own)[-1]]
        for answer in answers:
            assert answer["text"] == right and answer["output_ids"][-1] == end
            assert "".join(text for _, _, text in answer["meta_info"]["output_token_logprobs"]) == plain + marker
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


def test_errors(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    longest = client.models.list().data[0].model_extra
    assert longest is not None
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model_of(client), prompt=[1] * longest["max_model_len"])
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    status, answer = server.post("/v1/chat/completions", {"messages": "x"})
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_a_closed_stream_leaves_nothing_open(client: openai.OpenAI, server: ServerProcess) -> None:
    stream = client.completions.create(
        model=model_of(client), prompt="x", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()

    def settled() -> bool:
        info = server.get("/server_info")
        slots = info["gauges"]["slots"]
        return info["open_requests"] == 0 and slots["free"] + slots["cached"] == sum(slots.values())

    server.wait_until(settled)
    info = server.get("/server_info")
    assert info["audit"] == [] and info["gauges"]["slots"]["quarantined"] == 0
