"""Agents on a real server with openai's client: chat and responses, streamed or not, and which tokens are cached."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.api.scripted import make_checkpoint
from tests.api.server_process import ServerProcess

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
SYSTEM = "You help. " * 20
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


CITIES = ["Köln", "Rom", "Paris"]
# The scripted replies: for each city a call and then an answer, both after some reasoning.
REPLIES = [
    text
    for city in CITIES
    for text in (
        f"<think>\nI look for {city}.\n</think>\n\nOne moment.\n{call(city)}",
        f"<think>\nIt rains.\n</think>\n\nIt rains in {city}.",
    )
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_checkpoint(tmp_path_factory.mktemp("scripted"), REPLIES)
    with ServerProcess(["tests.api.scripted_server", str(folder), "served_model_name=scripted"]) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    server.post("/flush_cache", {})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


Step = tuple[dict[str, Any], int, int]


def complete(client: openai.OpenAI, messages: list[Any], stream: bool) -> Step:
    """Return the answer as a message, the number of prompt tokens, and how many of them were cached."""
    fields: Any = {"model": "scripted", "messages": messages, "tools": [WEATHER]}
    if not stream:
        whole = client.chat.completions.create(**fields)
        message, usage = whole.choices[0].message.to_dict(), whole.usage
        assert whole.choices[0].finish_reason == ("tool_calls" if message.get("tool_calls") else "stop")
    else:
        with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as events:
            for _ in events:
                pass
            final = events.get_final_completion()
        message, usage = final.choices[0].message.to_dict(), final.usage
        message = without_parsed(message)
    assert usage is not None and usage.prompt_tokens_details is not None
    return message, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def without_parsed(message: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields that the client's streaming helper adds."""
    calls = message.get("tool_calls") or ()
    shown = [
        {"id": c["id"], "type": "function", "function": {k: c["function"][k] for k in ("name", "arguments")}}
        for c in calls
    ]
    others = {k: v for k, v in message.items() if k not in ("parsed", "tool_calls")}
    return others | ({"tool_calls": shown} if shown else {})


def said(message: dict[str, Any]) -> tuple[Any, ...]:
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]
    return message["content"], message.get("reasoning_content"), calls


def converse(client: openai.OpenAI, stream: bool, keeps_reasoning: bool = True) -> tuple[list[Any], list[Step]]:
    """Return an agent's messages and steps: for every city a question, a call, its result, and an answer."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    steps: list[Step] = []
    for city in CITIES:
        messages.append({"role": "user", "content": f"How is the weather in {city}?"})
        for _ in range(2):
            step = complete(client, messages, stream)
            steps.append(step)
            message = step[0] if keeps_reasoning else {k: v for k, v in step[0].items() if k != "reasoning_content"}
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": called["id"], "content": "rain"}
                for called in message.get("tool_calls") or ()
            ]
    return messages, steps


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_and_answers(client: openai.OpenAI, stream: bool) -> None:
    _, steps = converse(client, stream)
    expected = [
        answer
        for city in CITIES
        for answer in (
            ("One moment.", f"I look for {city}.", [("weather", {"city": city})]),
            (f"It rains in {city}.", "It rains.", []),
        )
    ]
    assert [said(message) for message, _, _ in steps] == expected


def test_a_result_resumes_after_the_call_and_a_question_after_the_last_message(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    """The template drops reasoning before the last question, so a question resumes before the dropped reasoning."""
    messages, steps = converse(client, stream=False)
    questions = [end for end, message in enumerate(messages, 1) if message["role"] == "user"]
    ends = [tokens_of(server, messages[:end]) for end in questions]
    for turn, end in enumerate(ends):
        (_, prompt, cached), (_, longer, reused) = steps[2 * turn : 2 * turn + 2]
        # All tokens before the call's last one are cached; the last one is cached only if the model has consumed it.
        history = prompt + length(REPLIES[2 * turn]) + 1
        assert history - 1 <= reused <= history < longer
        # At least everything up to the end of the previous question is cached.
        assert end < prompt and (turn == 0 or ends[turn - 1] <= cached < prompt)


def tokens_of(server: ServerProcess, messages: list[Any]) -> int:
    body = {"messages": messages, "tools": [WEATHER], "add_generation_prompt": False}
    return int(server.post("/tokenize", body)[1]["count"])


def length(reply: str) -> int:
    """Return the length of a reply in tokens: each tag is one token, other text is bytes."""
    for tag in TAGS:
        reply = reply.replace(tag, "\0")
    return len(reply.encode())


def test_without_its_reasoning_an_agent_resumes_after_the_last_message(client: openai.OpenAI) -> None:
    """Without the earlier reasoning the prompt differs, but everything up to the question is cached."""
    _, steps = converse(client, stream=False, keeps_reasoning=False)
    for (_, prompt, _), (_, longer, reused) in zip(steps[::2], steps[1::2], strict=True):
        assert prompt - len("<|im_start|>assistant\n") - 1 <= reused < longer


def whole(client: openai.OpenAI, fields: dict[str, Any]) -> Any:
    return client.responses.create(**fields)


def streamed(client: openai.OpenAI, fields: dict[str, Any]) -> Any:
    with client.responses.stream(**fields) as events:
        for _ in events:
            pass
        return events.get_final_response()


def over_a_websocket(client: openai.OpenAI, fields: dict[str, Any]) -> Any:
    with client.responses.connect() as connection:
        connection.response.create(**fields)
        return next(event.response for event in connection if event.type == "response.completed")


@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")  # caused by openai's client
@pytest.mark.parametrize("respond", [whole, streamed, over_a_websocket])
@pytest.mark.parametrize("chained", [True, False], ids=["chained", "sent back"])
def test_an_agent_of_responses(client: openai.OpenAI, respond: Callable[..., Any], chained: bool) -> None:
    tool = {"type": "function", **WEATHER["function"]}
    outputs, reused, items, last = [], [], list[Any](), None
    for city in CITIES:
        new: list[Any] = [{"role": "user", "content": f"How is the weather in {city}?"}]
        while new:
            items += new
            context = {"input": new, "previous_response_id": last} if chained and last else {"input": items}
            fields = {"model": "scripted", "tools": [tool], "instructions": SYSTEM, **context}
            response = respond(client, fields)
            last, new = response.id, []
            for item in response.output:
                match item.type:
                    case "function_call":
                        outputs.append(json.loads(item.arguments))
                        new.append({"type": "function_call_output", "call_id": item.call_id, "output": "rain"})
                    case "reasoning":
                        outputs.append(item.content[0].text)
                    case "message":
                        outputs.append(item.content[0].text)
            items += [item.to_dict() for item in response.output]
            items = [{k: v for k, v in item.items() if k != "parsed_arguments"} for item in items]
            reused.append(response.usage.input_tokens_details.cached_tokens / response.usage.input_tokens)
    assert outputs == [
        text
        for city in CITIES
        for text in (
            f"I look for {city}.", "One moment.", {"city": city}, "It rains.", f"It rains in {city}.",
        )
    ]  # fmt: skip
    assert min(reused[1::2]) > 0.85 and min(reused[2::2]) > 0.6


def test_a_session_continues_after_calls(client: openai.OpenAI, server: ServerProcess) -> None:
    _, session = server.post("/v1/sessions", {})
    path = f"/v1/sessions/{session['id']}/turns"
    new: list[Any] = [{"role": "user", "content": "How is the weather in Köln?"}]
    _, first = server.post(path, {"messages": new, "tools": [WEATHER]})
    [called] = first["message"]["tool_calls"]
    new = [{"role": "tool", "tool_call_id": called["id"], "content": "rain"}]
    _, second = server.post(path, {"messages": new, "tools": [WEATHER]})
    assert second["message"]["content"] == "It rains in Köln."
    # The history is the exact beginning of the prompt; a line break after the answer and the tool's result follow it.
    assert second["start"] == second["history"] == first["position"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_model_that_would_not_call_a_tool_can_be_forced_to(server: ServerProcess, choice: Any) -> None:
    """The scripted second answer has no call. The arguments of the forced call are random, but follow the schema."""
    parameters = {"properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "How is the weather?"},
    ]
    body = {"messages": messages, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
    status, answer = server.post("/v1/chat/completions", {**body, "max_tokens": 400})
    assert status == 200, answer
    [made] = answer["choices"]
    [call] = made["message"]["tool_calls"]
    assert made["finish_reason"] == "tool_calls" and made["message"]["reasoning_content"] == "It rains."
    assert made["message"]["content"] is None and json.loads(call["function"]["arguments"])["n"] in (1, 2, 3)
