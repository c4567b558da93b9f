"""A model that prefers white space, in a real server: every call and every object ends, in every API, streamed or not.

The bundled model becomes such a model by the field logit_bias.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import jsonschema
import pytest

from baton.models.text.formats.picking import TOOL_FORMATS
from baton.models.text.tokenizer import load_text
from tests.api.server_process import SERVE, ServerProcess

TEXT = load_text(Path(__file__).parents[2] / "models" / "bundled")
MESSAGES: Any = [{"role": "user", "content": "What is 3 + 4?"}]
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "sign": {"enum": ["+", "-"]}},
    "required": ["x", "sign"],
    "additionalProperties": False,
}
LISTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}}, "minItems": 1, "maxItems": 3},
        "inner": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    },
    "required": ["rows", "inner"],
    "additionalProperties": False,
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 200}},
    "required": ["name"],
}
ANY: dict[str, Any] = {"type": "object"}
TOOLS = {"add": ADD, "fill": LISTS}
# After white space the model prefers an end: that of a sequence, else of a string, a list or an object.
SPACE, END, QUOTE, CLOSING = 100, 90, 80, 70


def bias_of(id: int) -> int:
    text = TEXT.decode([id], skip_special_tokens=False)
    if id in TEXT.eos_ids:
        return END
    if text and not text.strip(" \t\r\n\f\v"):
        return SPACE
    return QUOTE if text == '"' else CLOSING if text in ("}", "]") else 0


BIASES = {str(id): bias for id in range(TEXT.vocab_size) if (bias := bias_of(id))}


@dataclass(frozen=True)
class Case:
    """A kind of request, and how its answer is read."""

    path: str
    body: dict[str, Any]
    schemas: dict[str, dict[str, Any]]  # the schemas of the answer, by the names of tools; "" for an object
    read: Callable[[Sequence[Any], bool], list[tuple[str, str]]]  # from its events: names of tools and JSON texts


def read_chat(events: Sequence[Any], stream: bool) -> list[tuple[str, str]]:
    content, calls = "", list[list[str]]()
    for event in events:
        for choice in event["choices"]:
            part = choice["delta" if stream else "message"]
            content += part.get("content") or ""
            for call in part.get("tool_calls") or ():
                if call.get("id"):
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"].get("arguments") or ""
            finish = choice["finish_reason"]
    assert finish == ("tool_calls" if calls else "stop")
    return [(name, arguments) for name, arguments in calls] or [("", content)]


def read_completion(events: Sequence[Any], stream: bool) -> list[tuple[str, str]]:
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    return [("", "".join(choice["text"] for event in events for choice in event["choices"]))]


def read_response(events: Sequence[Any], stream: bool) -> list[tuple[str, str]]:
    response = events[-1]["response"] if stream else events[-1]
    assert response["status"] == "completed"
    calls = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
    texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return calls or [("", "".join(texts))]


def read_message(events: Sequence[Any], stream: bool) -> list[tuple[str, str]]:
    if not stream:
        assert events[0]["stop_reason"] in ("end_turn", "tool_use")
        blocks = events[0]["content"]
        return [("", b["text"]) if b["type"] == "text" else (b["name"], json.dumps(b["input"])) for b in blocks]
    found = list[list[str]]()
    for event in events:
        if event["type"] == "content_block_start":
            found.append([event["content_block"].get("name", ""), ""])
        elif event["type"] == "content_block_delta":
            found[-1][1] += event["delta"].get("text", event["delta"].get("partial_json", ""))
        elif event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] in ("end_turn", "tool_use")
    return [(name, text) for name, text in found]


def read_generated(events: Sequence[Any], stream: bool) -> list[tuple[str, str]]:
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    return [("", events[-1]["text"])]


def read_turn(events: Sequence[Any], stream: bool) -> list[tuple[str, str]]:
    ended = events[-1]
    assert ended["finish_reason"] == "stop"
    calls = ended.get("message", {}).get("tool_calls", ())
    return [(c["function"]["name"], c["function"]["arguments"]) for c in calls] or [("", ended["text"])]


def in_format(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": strict}}


CHAT, TURN = "/v1/chat/completions", "/v1/sessions/s/turns"
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
FLAT = [{"type": "function", "name": name, "parameters": TOOLS[name]} for name in TOOLS]
CUSTOM = [{"name": name, "input_schema": TOOLS[name]} for name in TOOLS]
NAMED = {"type": "function", "function": {"name": "add"}}
CALLS = [
    Case(CHAT, {"messages": MESSAGES, "tools": FUNCTIONS, "tool_choice": "required"}, TOOLS, read_chat),
    Case(CHAT, {"messages": MESSAGES, "tools": FUNCTIONS, "tool_choice": NAMED}, {"add": ADD}, read_chat),
    Case(
        CHAT,
        {"messages": MESSAGES, "tools": FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": False},
        TOOLS,
        read_chat,
    ),
    Case(
        CHAT,
        {"messages": MESSAGES, "tools": FUNCTIONS, "response_format": in_format(ADD, True)},
        {**TOOLS, "": ADD},
        read_chat,
    ),
    Case("/v1/responses", {"input": "3 + 4?", "tools": FLAT, "tool_choice": "required"}, TOOLS, read_response),
    Case("/v1/messages", {"messages": MESSAGES, "tools": CUSTOM, "tool_choice": {"type": "any"}}, TOOLS, read_message),
    Case(
        "/v1/messages",
        {"messages": MESSAGES, "tools": CUSTOM, "tool_choice": {"type": "tool", "name": "fill"}},
        {"fill": LISTS},
        read_message,
    ),
    Case(TURN, {"messages": MESSAGES, "tools": FUNCTIONS, "tool_choice": "required"}, TOOLS, read_turn),
]
OBJECTS = [
    Case(CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, {"": ANY}, read_chat),
    Case(CHAT, {"messages": MESSAGES, "response_format": in_format(PERSON, False)}, {"": PERSON}, read_chat),
    Case(CHAT, {"messages": MESSAGES, "response_format": in_format(LISTS, True)}, {"": LISTS}, read_chat),
    Case(CHAT, {"messages": MESSAGES, "structured_outputs": {"json": PERSON}}, {"": PERSON}, read_chat),
    Case("/v1/completions", {"prompt": "A person:", "guided_json": PERSON}, {"": PERSON}, read_completion),
    Case("/v1/completions", {"prompt": "{", "response_format": {"type": "json_object"}}, {"": ANY}, read_completion),
    Case("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_object"}}}, {"": ANY}, read_response),
    Case(
        "/v1/responses",
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": PERSON, "strict": True}}},
        {"": PERSON},
        read_response,
    ),
    Case(
        "/v1/messages",
        {"messages": MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
        {"": PERSON},
        read_message,
    ),
    Case(
        "/generate",
        {"text": "Hi", "sampling_params": {"json_schema": json.dumps(PERSON)}},
        {"": PERSON},
        read_generated,
    ),
    Case(TURN, {"messages": MESSAGES, "guided_json": LISTS}, {"": LISTS}, read_turn),
]
MOST_TOKENS = 900


def send(server: ServerProcess, case: Case, stream: bool, number: int) -> list[tuple[str, str]]:
    """Send a request, and return the answer: the name of each called tool, or "", and its JSON."""
    limit = {"/v1/responses": "max_output_tokens", "/generate": "max_new_tokens"}.get(case.path, "max_tokens")
    # The temperature makes the answers differ; the biases are far above it.
    sampling = {"logit_bias": BIASES, "temperature": 1, "seed": number, limit: MOST_TOKENS}
    if case.path == "/generate":
        sampling["sampling_seed"] = sampling.pop("seed")
        body = case.body | {"sampling_params": case.body["sampling_params"] | sampling}
    else:
        body = case.body | sampling
    path = case.path
    if path == TURN:
        path = f"/v1/sessions/s{number}/turns"
        server.post("/v1/sessions", {"id": f"s{number}"})
    request = Request(
        server.url + path, json.dumps(body | {"stream": stream}).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=300) as response:
        text = response.read().decode()
    if not stream:
        return case.read([json.loads(text)], False)
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return case.read([json.loads(each) for each in data if each != "[DONE]"], True)


def check_all(server: ServerProcess, cases: Sequence[Case], count: int) -> None:
    """Send `count` requests of these cases, streamed and not, and check that each answer follows its schema."""
    kinds = [(case, stream) for case in cases for stream in (False, True)]
    numbered = [(*kind, number) for number, kind in enumerate(islice(cycle(kinds), count))]

    def check(each: tuple[Case, bool, int]) -> None:
        case, stream, number = each
        answers = send(server, case, stream, number)
        assert answers, each
        for name, text in answers:
            jsonschema.validate(json.loads(text), case.schemas[name])

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(check, numbered):
            pass


@pytest.fixture(scope="module", params=[*TOOL_FORMATS])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    limits = ["--memory", "256M", "--max-running", "8", "--session-cap", "4000"]
    with ServerProcess([*SERVE, "--tool-parser", request.param, *limits]) as running:
        yield running


@pytest.fixture(scope="module")
def usual(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, "--memory", "256M", "--max-running", "8"]) as running:
        yield running


def test_every_call_and_every_object_ends(usual: ServerProcess) -> None:
    cases = [*CALLS, *OBJECTS]
    check_all(usual, cases, 2 * len(cases))


@pytest.mark.soak
def test_2000_calls_and_objects_end_in_each_format(server: ServerProcess) -> None:
    check_all(server, [*CALLS, *OBJECTS], 2000)
