"""Outputs that follow a grammar, with the bundled model in a real server process, combined with other options."""

import functools
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import jsonschema
import openai
import pytest
from hypothesis import given, settings, strategies as st

from tests.api.schemas import random_schema
from tests.api.server_process import ROOT, SERVE, ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about Clara, who is 31, as JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["tall", "kind"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.fixture(scope="module", params=["overlap", "alone"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    alone = ["--no-overlap"] if request.param == "alone" else []
    with ServerProcess([*SERVE, "--memory", "256M", "--max-running", "8", "--codec-check", *alone]) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def chat(server: ServerProcess, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200} | fields
    status, answer = post(server, "/v1/chat/completions", body)
    assert status == 200, answer
    return [
        {"text": choice["message"]["content"], "end": choice["finish_reason"], "logprobs": choice["logprobs"]}
        for choice in answer["choices"]
    ]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema_holds_and_a_stream_says_the_same(client: openai.OpenAI, temperature: float) -> None:
    fields: Any = {
        "model": "default",
        "messages": MESSAGES,
        "temperature": temperature,
        "seed": 4,
        "max_tokens": 300,
        "response_format": FORMAT,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.create(**fields, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.finish_reason == "stop" and whole.message.content == text
    jsonschema.validate(json.loads(text), PERSON)


def test_responses_hold_it_too(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    fields: Any = {"model": "default", "input": "Who is Clara?", "temperature": 0, "text": {"format": format}}
    whole = client.responses.create(**fields)
    jsonschema.validate(json.loads(whole.output_text), PERSON)
    with client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_regexes_choices_and_grammars(server: ServerProcess) -> None:
    [number] = chat(server, guided_regex=r"\d{3}-\d{4}", temperature=1.5)
    assert re.fullmatch(r"\d{3}-\d{4}", number["text"]) and number["end"] == "stop"
    [greeting] = chat(server, structured_outputs={"grammar": 'root ::= "Hello " name\nname ::= [A-Z] [a-z] [a-z]'})
    assert re.fullmatch("Hello [A-Z][a-z][a-z]", greeting["text"])
    status, answer = post(server, "/generate", {"text": "x", "sampling_params": {"regex": "(yes|no)"}})
    assert status == 200 and answer["text"] in ("yes", "no") and answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_each_choice_follows_it_and_draws_for_itself(server: ServerProcess) -> None:
    answers = chat(server, guided_choice=["red", "green", "blue"], n=8, temperature=20, seed=1)
    assert {answer["text"] for answer in answers} <= {"red", "green", "blue"}
    assert len({answer["text"] for answer in answers}) > 1


def test_other_ends_of_an_answer(server: ServerProcess) -> None:
    [stopped] = chat(server, guided_regex="(ab){5}c", stop=["bab"])
    assert (stopped["text"], stopped["end"]) == ("a", "stop")
    [cut] = chat(server, guided_regex="(ab){5}c", max_tokens=3)
    assert (cut["text"], cut["end"]) == ("aba", "length")
    [complete] = chat(server, guided_regex="(ab){5}c", max_tokens=11, ignore_eos=True, min_tokens=11)
    assert (complete["text"], complete["end"]) == ("ababababab" + "c", "stop")
    [early] = chat(server, guided_choice=["yes"], max_tokens=50, min_tokens=20)
    assert (early["text"], early["end"]) == ("yes", "stop")
    [nothing] = chat(server, guided_regex="")
    assert (nothing["text"], nothing["end"]) == ("", "stop")


def test_an_answer_ends_where_the_grammar_allows_and_not_before_min_tokens(server: ServerProcess) -> None:
    [short] = chat(server, guided_regex="[qxz]*", logit_bias={"258": 100, "256": 100})
    [longer] = chat(server, guided_regex="[qxz]*", logit_bias={"258": 100, "256": 100}, min_tokens=5)
    assert (short["text"], short["end"]) == ("", "stop")
    assert len(longer["text"]) == 5 and longer["end"] == "stop"
    [endless] = chat(server, guided_regex="[qxz]*", logit_bias={"258": 100, "256": 100}, ignore_eos=True)
    assert len(endless["text"]) == 200 and endless["end"] == "length"


def test_log_probabilities_are_the_models_own(server: ServerProcess) -> None:
    """Log probabilities are computed before the mask, so the grammar may forbid the most probable token."""
    [free] = chat(server, max_tokens=1, logprobs=True, top_logprobs=2)
    [held] = chat(server, guided_choice=["zz"], logprobs=True, top_logprobs=2)
    tops = [each["logprobs"]["content"][0]["top_logprobs"] for each in (free, held)]
    assert tops[0] == tops[1] and held["logprobs"]["content"][0]["token"] == "z"
    assert held["logprobs"]["content"][0]["logprob"] < tops[0][1]["logprob"]


def test_a_session_continues_after_a_turn_that_followed_a_schema(server: ServerProcess) -> None:
    assert post(server, "/v1/sessions", {"id": "talk"})[0] in (200, 201)
    body = {"messages": MESSAGES, "temperature": 0, "response_format": FORMAT}
    status, first = post(server, "/v1/sessions/talk/turns", body)
    assert status == 200, first
    jsonschema.validate(json.loads(first["text"]), PERSON)
    status, second = post(server, "/v1/sessions/talk/turns", {"messages": MESSAGES, "guided_regex": "[0-9]{3}"})
    assert status == 200 and re.fullmatch("[0-9]{3}", second["text"]) and second["start"] > 0


def nested(depth: int) -> dict[str, Any]:
    return functools.reduce(lambda inner, _: {"items": inner}, range(depth), dict[str, Any]())


HOSTILE: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^(a{1000}){1000}$"},
    {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
    {"allOf": [{"anyOf": [{"properties": {f"{i}.{j}": {}}} for j in range(4)]} for i in range(8)]},
    {"$ref": "#"},
    nested(900),
    {"type": "integer", "multipleOf": 999983},
]


def test_hostile_schemas_are_refused_without_blocking_others(server: ServerProcess, client: openai.OpenAI) -> None:
    """While a hostile schema compiles for a second of CPU time, the event loop answers, even on a slow machine."""

    def attack() -> list[tuple[int, float, float]]:
        return [refused(schema) for schema in HOSTILE]

    def refused(schema: dict[str, Any]) -> tuple[int, float, float]:
        began = time.monotonic()
        return post(server, "/v1/completions", {"prompt": "a", "guided_json": schema})[0], began, time.monotonic()

    def stream() -> int:
        fields: Any = {"model": "default", "prompt": "a", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        return len(list(client.completions.create(**fields, stream=True)))

    answered = list[float]()
    with ThreadPoolExecutor() as pool:
        attacked, streamed = pool.submit(attack), pool.submit(stream)
        while not attacked.done():
            with urlopen(f"{server.url}/health", timeout=30) as answer:
                assert answer.status == 200
            answered.append(time.monotonic())
    statuses = [status for status, _, _ in attacked.result()]
    _, began, ended = attacked.result()[0]  # the one that compiles until its time is up; others end in milliseconds
    assert statuses[0] == 400 and {*statuses} <= {400, 503} and len(statuses) == len(HOSTILE)
    assert streamed.result() > 100
    assert sum(began < each < ended for each in answered) > 20, "those of a loop that is held up are a few"


@pytest.mark.parametrize("actor", ["results", "scheduler"])
def test_a_restart_in_the_middle_changes_nothing(actor: str) -> None:
    """The actor raises at its 200th message; there are answers enough for that to happen, also with drafts."""
    with ServerProcess(["tests.api.faulty_server", actor, str(ROOT / "models" / "bundled"), "memory=256M"]) as server:
        texts = [chat(server, guided_regex="([qxz]{3}-){40}end", max_tokens=300)[0]["text"] for _ in range(16)]
        assert server.get("/server_info")["counters"]["restarts"] == 1
    assert len(set(texts)) == 1 and re.fullmatch("([qxz]{3}-){40}end", texts[0])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_schemas_of_all_kinds_hold(server: ServerProcess, temperature: float) -> None:

    assert sum(holds(server, seed, temperature) for seed in range(20)) > 10


@pytest.mark.soak
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_hundreds_of_schemas_hold(server: ServerProcess, temperature: float, seed: int) -> None:
    holds(server, seed, temperature)


def holds(server: ServerProcess, seed: int, temperature: float) -> bool:
    """Check that the answer follows its schema. Return False if the answer was cut off at the token limit."""
    schema = random_schema(random.Random(seed))
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    [answer] = chat(server, response_format=format, temperature=temperature, seed=seed, max_tokens=400)
    if answer["end"] == "length":
        return False
    jsonschema.validate(json.loads(answer["text"]), schema)
    return True
