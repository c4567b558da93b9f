"""An agent with Anthropic's client on a real server, streamed or not, and how many tokens of each prompt are cached."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types import Message
from pydantic import BaseModel

from tests.api.scripted import make_checkpoint
from tests.api.server_process import SERVE, ServerProcess
from tests.api.test_agents import CITIES, REPLIES, SCHEMA, call

TOOL: Any = {"name": "weather", "description": "Tells.", "input_schema": SCHEMA}
NOW: Any = {"name": "now", "description": "It says what time it is. " * 5, "input_schema": {"type": "object"}}
GET_WEATHER: Any = TOOL | {"name": "get_weather"}
MARK: Any = {"cache_control": {"type": "ephemeral"}}
RULES = "You help. " * 20
HELLO: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_checkpoint(tmp_path_factory.mktemp("scripted"), REPLIES)
    with ServerProcess(["tests.api.scripted_server", str(folder), "served_model_name=scripted"]) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    server.post("/flush_cache", {})
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def ask(client: anthropic.Anthropic, stream: bool = False, **fields: Any) -> Message:
    arguments: Any = {"model": "scripted", "max_tokens": 400, "tools": [TOOL]} | fields
    if not stream:
        answer = client.messages.create(**arguments)
        assert isinstance(answer, Message)
        return answer
    with client.messages.stream(**arguments) as events:
        return events.get_final_message()


def read(answer: Message) -> int:
    return answer.usage.cache_read_input_tokens or 0


def length(answer: Message) -> int:
    """Return the number of prompt tokens of an answer, cached or not."""
    return answer.usage.input_tokens + read(answer) + (answer.usage.cache_creation_input_tokens or 0)


def converse(client: anthropic.Anthropic, stream: bool) -> list[Message]:
    """Run the agent's conversation (question, call, result, answer) for every city, and return the model's answers."""
    messages: list[Any] = []
    answers = []
    for city in CITIES:
        new: list[Any] = [{"type": "text", "text": f"How is the weather in {city}?"}]
        while new:
            messages.append({"role": "user", "content": new})
            fields: Any = {"messages": messages, "system": RULES}
            answers.append(ask(client, stream, **fields))
            count = client.messages.count_tokens(model="scripted", tools=[TOOL], **fields)
            assert count.input_tokens == length(answers[-1])
            messages.append({"role": "assistant", "content": answers[-1].content})
            calls = [block.id for block in answers[-1].content if block.type == "tool_use"]
            new = [{"type": "tool_result", "tool_use_id": id, "content": "rain"} for id in calls]
    return answers


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_and_answers(client: anthropic.Anthropic, stream: bool) -> None:
    answers = converse(client, stream)
    outlines = [
        [block.to_dict() | ({"id": ""} if block.type == "tool_use" else {}) for block in answer.content]
        for answer in answers
    ]
    for blocks in outlines:
        assert len(str(blocks[0].pop("signature"))) == 64
    assert outlines == [
        blocks
        for city in CITIES
        for blocks in (
            [
                {"type": "thinking", "thinking": f"I look for {city}."},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "", "name": "weather", "input": {"city": city}},
            ],
            [{"type": "thinking", "thinking": "It rains."}, {"type": "text", "text": f"It rains in {city}."}],
        )
    ]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"] * len(CITIES)
    for first, second in zip(answers[::2], answers[1::2], strict=True):
        # The second prompt, with the tool's result, resumes at most two tokens before the end of the call.
        history = length(first) + first.usage.output_tokens
        assert history - 2 <= read(second) <= history < length(second)
    assert all(read(answer) > 0 for answer in answers[1:])


def test_tool_choice_forces_the_named_tool(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, [call("Rom")])
    rest: Any = {"name": "rest", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    fields: Any = {"messages": HELLO, "tools": [TOOL, rest], "extra_body": {"temperature": 0}}
    with (
        ServerProcess(["tests.api.scripted_server", str(folder), "served_model_name=scripted"]) as running,
        anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client,
    ):
        for choice, name in (({"type": "any"}, "weather"), ({"type": "tool", "name": "rest"}, "rest")):
            for stream in (False, True):
                answer = ask(client, stream, tool_choice=choice, **fields)
                assert [block.name for block in answer.content if block.type == "tool_use"] == [name]
                assert answer.stop_reason == "tool_use"


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def in_system(end: str, **mark: Any) -> dict[str, Any]:
    return {"system": [text(RULES, **mark), text(end)]}


def in_question(end: str, **mark: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [text(RULES, **mark), text(end)]}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_continues_without_a_thread(client: anthropic.Anthropic, stream: bool) -> None:
    """The client first asks for a thread, which the server refuses in a way that it understands."""
    cities: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather."""
        cities.append(city)
        return "rain"

    fields: Any = {"model": "scripted", "max_tokens": 400, "tools": [weather], "stream": stream}
    fields["messages"] = [{"role": "user", "content": f"How is the weather in {CITIES[0]}?"}]
    final = client.beta.messages.tool_runner(**fields).until_done()
    assert cities == [CITIES[0]] and final.stop_reason == "end_turn"
    assert client.beta.messages.count_tokens(model="scripted", messages=HELLO).input_tokens > 0


def in_tools(end: str, **mark: Any) -> dict[str, Any]:
    return {"tools": [{**TOOL, "description": RULES, **mark}, {**NOW, "description": end}]}


def after_tools(end: str, **mark: Any) -> dict[str, Any]:
    return {"tools": [TOOL, {**NOW, "description": RULES, **mark}], "messages": [{"role": "user", "content": end}]}


@pytest.mark.parametrize("part", [in_system, in_question, in_tools, after_tools])
def test_a_mark_is_a_checkpoint(client: anthropic.Anthropic, server: ServerProcess, part: Any) -> None:
    """Two chats that agree up to a cache_control mark share the state there. Without a mark no state is kept there."""
    known = []
    for mark in ({}, MARK):
        server.post("/flush_cache", {})
        first, second = (ask(client, **{"messages": HELLO} | part(end, **mark)) for end in ("Köln.", "Rom."))
        assert (read(first), second.usage.cache_creation_input_tokens) == (0, 0)
        known.append((first.usage.cache_creation_input_tokens, read(second)))
    assert known[0] == (0, 0)
    created, reused = known[1]
    assert created == reused > len(RULES)


def test_a_mark_at_the_end_of_each_prompt_is_read_by_the_next(client: anthropic.Anthropic) -> None:
    question: Any = {"role": "user", "content": [text("Weather?", **MARK)]}
    first = ask(client, messages=[question])
    [id] = [block.id for block in first.content if block.type == "tool_use"]
    result: Any = {"type": "tool_result", "tool_use_id": id, "content": "rain " * 50, **MARK}
    answer: Any = {"role": "assistant", "content": first.content}
    chat: list[Any] = [question, answer, {"role": "user", "content": [result]}]
    second = ask(client, messages=chat)
    created = second.usage.cache_creation_input_tokens or 0
    assert created > len("rain " * 50) and second.usage.input_tokens == 1 + len("assistant\n")
    again = ask(client, messages=[*chat, {"role": "assistant", "content": "Well"}])
    assert created + read(second) <= read(again) < length(second)


def test_a_prompt_computed_ahead_is_read_from_the_cache(client: anthropic.Anthropic) -> None:
    ask(client, messages=HELLO, max_tokens=0)
    answer = ask(client, messages=HELLO)
    assert length(answer) - 2 <= read(answer) < length(answer)


@pytest.fixture(scope="module")
def bundled() -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, "--memory", "256M", "--api-key", "mine"], key="mine") as running:
        yield running


class Person(BaseModel):
    name: Literal["Clara", "Bob"]
    tall: bool


def test_an_answer_follows_its_schema(bundled: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=bundled.url, api_key="mine", max_retries=0) as client:
        fields: Any = {"model": "default", "max_tokens": 200, "messages": HELLO, "output_format": Person}
        for temperature in (0, 1.5):
            fields["extra_body"] = {"temperature": temperature, "seed": 3}
            answer = client.messages.parse(**fields)
            assert isinstance(answer.parsed_output, Person)
            with client.messages.stream(**fields) as events:
                assert events.get_final_message().parsed_output == answer.parsed_output
        wrong: Any = {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
            client.messages.create(model="default", max_tokens=9, messages=HELLO, output_config=wrong)


def test_the_bundled_model(bundled: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=bundled.url, api_key="mine", max_retries=0) as client:
        assert len(client.models.list().data) == 1
        messages: list[Any] = []
        seen = []
        for words in ("My name is Clara.", "What is 3 plus 4?", "What is my name?"):
            messages.append({"role": "user", "content": words})
            fields: Any = {
                "model": "default", "messages": messages, "max_tokens": 40, "extra_body": {"temperature": 0}
            }  # fmt: skip
            answer = client.messages.create(**fields)
            with client.messages.stream(**fields) as events:
                assert events.get_final_text() == answer.content[0].text
            seen.append(read(answer))
            messages.append({"role": "assistant", "content": answer.content})
        [block] = messages[-1]["content"]
        assert "Clara" in block.text and answer.stop_reason == "end_turn"
        assert seen[0] == 0 and 0 < seen[1] < seen[2]
        prefill = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "3 plus 4 is"}]
        fields = {"model": "default", "messages": prefill, "max_tokens": 20, "extra_body": {"temperature": 0}}
        [block] = client.messages.create(**fields).content
        assert "7" in block.text and not block.text.startswith("3 plus")
        fields["messages"] = [{"role": "user", "content": "Please get the weather in Bergen."}]
        [block] = client.messages.create(**fields | {"max_tokens": 100}, tools=[GET_WEATHER]).content
        assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {"city": "Bergen"})
    with (
        anthropic.Anthropic(base_url=bundled.url, api_key="yours", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.count_tokens(model="default", messages=messages)
