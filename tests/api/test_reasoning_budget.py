"""Budgets of reasoning, with the bundled model in a real server, whose template begins each answer with a thought."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from baton.api.config import Config
from baton.api.serve import StartError
from baton.api.wiring import load
from tests.api.server_process import SERVE, ServerProcess

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about Clara, who is 31."}]
DEFAULT = 6  # --reasoning-budget
MARKERS = {"<tools>": "<think>", "</tools>": "</think>"}  # tokens of the bundled model that the test renames
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 200}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(BUNDLED, folder)
    tokenizer = (folder / "tokenizer.json").read_text()
    for name, marker in MARKERS.items():
        tokenizer = tokenizer.replace(f'"{name}"', f'"{marker}"')
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ["--memory", "256M", "--reasoning-budget", str(DEFAULT), "--served-model-name", "m"]
    with ServerProcess([*SERVE, str(folder), *options]) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def answered(client: openai.OpenAI, more: dict[str, Any], **fields: Any) -> tuple[str, str, int]:
    """Return an answer's reasoning, its text, and the number of reasoning tokens, of which one is the end marker.

    more: fields that OpenAI's client does not know.
    """
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, temperature=0, max_tokens=40, extra_body={"ignore_eos": True, **more}, **fields
    )
    [choice], usage = answer.choices, answer.usage
    assert usage is not None and usage.completion_tokens_details is not None
    counted = usage.completion_tokens_details.reasoning_tokens
    return getattr(choice.message, "reasoning_content", ""), choice.message.content or "", counted or 0


@pytest.mark.parametrize(("own", "most"), [(None, DEFAULT), (1, 1), (3, 3), (0, 0)])
def test_reasoning_ends_with_its_budget_and_an_answer_follows(
    client: openai.OpenAI, own: int | None, most: int
) -> None:
    reasoning, text, counted = answered(client, {} if own is None else {"thinking_token_budget": own})
    assert text and bool(reasoning) == (most > 0)
    assert counted == (most + 1 if most else 0)  # an empty thought is none


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    more = {"thinking_token_budget": 4, "ignore_eos": True}
    reasoning, text, _ = answered(client, more)
    thought, answer = "", ""
    with client.chat.completions.create(
        model="m", messages=MESSAGES, temperature=0, max_tokens=40, stream=True, extra_body=more
    ) as stream:
        for chunk in stream:
            thought += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            answer += chunk.choices[0].delta.content or ""
    assert (thought, answer) == (reasoning, text)


def test_a_budget_that_is_not_used_up_changes_nothing(client: openai.OpenAI) -> None:
    """Without a thought in the prompt the model begins none, and the answer is the one without a budget."""
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    free = answered(client, {**off, "thinking_token_budget": 1000})
    assert answered(client, {**off, "thinking_token_budget": 2}) == free
    assert free[0] == "" and free[2] == 0


def test_a_format_holds_after_the_reasoning(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA, "strict": True}}
    reasoning, text, counted = answered(client, {"thinking_token_budget": 2}, response_format=format)
    assert reasoning and counted == 3
    assert isinstance(json.loads(text)["age"], int)


def test_budget_tokens_of_messages(server: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as api:
        answer = api.messages.create(
            model="m", max_tokens=40, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 3}
        )
    assert answer.content[0].type == "thinking"
    assert answer.usage.output_tokens_details is not None
    assert answer.usage.output_tokens_details.thinking_tokens == 4


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"reasoning": {"max_tokens": 3}}, 3),
        ({"reasoning": {"max_tokens": 0}}, 0),
        ({"thinking_token_budget": 2, "reasoning": {"max_tokens": None}}, 2),
        ({}, DEFAULT),
    ],
)
def test_a_response(client: openai.OpenAI, fields: dict[str, Any], most: int) -> None:
    body: dict[str, Any] = {"ignore_eos": True, **fields}
    answer = client.responses.create(model="m", input=MESSAGES, temperature=0, max_output_tokens=40, extra_body=body)
    assert answer.usage is not None and answer.output_text
    assert answer.usage.output_tokens_details.reasoning_tokens == (most + 1 if most else 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": "3"}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 3}, "thinking_token_budget": 3}, "thinking_token_budget"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ],
)
def test_a_response_s_budget_that_is_refused(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    status, answer = server.post("/v1/responses", {"input": MESSAGES, **fields})
    assert (status, answer["error"]["param"]) == (400, param)


def test_a_turn_of_a_session(server: ServerProcess) -> None:
    status, session = server.post("/v1/sessions", {})
    assert status == 200
    fields = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    status, turn = server.post(f"/v1/sessions/{session['id']}/turns", fields | {"thinking_token_budget": 2})
    assert status == 200
    vocabulary = json.loads((BUNDLED / "tokenizer.json").read_text())
    [end] = [token["id"] for token in vocabulary["added_tokens"] if token["content"] == "</tools>"]
    assert turn["output_ids"].index(end) == 2


def test_a_budget_below_zero_is_refused(server: ServerProcess) -> None:
    status, answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "thinking_token_budget": -1})
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")


def test_a_model_that_does_not_reason_cannot_be_limited() -> None:
    with pytest.raises(StartError, match="--reasoning-budget: the model does not reason"):
        load(Config(reasoning_budget=3, memory=2**26, kernels="torch"), lambda done, total: None)
