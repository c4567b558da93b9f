"""The reasoning of earlier turns in the prompt: the next turn then resumes from the end of the turn before."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.server_process import SERVE, ServerProcess

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
MARKERS = {"<tools>": "<think>", "</tools>": "</think>"}  # tokens of the bundled model that the tests rename
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content and CONDITION %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
VARIABLE = "(preserve_thinking is defined and preserve_thinking)"
QUESTION, OTHER = "What is 7 plus 5?", "What colour is the sky?"  # answered with tokens as the tokenizer makes them
NEXT = "And about Paul?"
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "min_tokens": 12, "thinking_token_budget": 4}
FORGETS = "--preserve-reasoning has no effect"


def make_model(folder: Path, condition: str) -> Path:
    """Copy the bundled model with a template that shows the reasoning of earlier turns under a condition."""
    shutil.copytree(BUNDLED, folder)
    tokenizer = (folder / "tokenizer.json").read_text()
    for name, marker in MARKERS.items():
        tokenizer = tokenizer.replace(f'"{name}"', f'"{marker}"')
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("CONDITION", condition))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_model(tmp_path_factory.mktemp("thinking") / "model", VARIABLE)
    with ServerProcess([*SERVE, str(folder), "--memory", "256M"]) as running:
        yield running


def chat(server: ServerProcess, messages: list[Any], **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answer's message and its usage."""
    status, answer = server.post("/v1/chat/completions", {"messages": messages, **FIELDS, **fields})
    assert status == 200, answer
    return answer["choices"][0]["message"], answer["usage"]


def two_turns(server: ServerProcess, first: str, **fields: Any) -> tuple[int, int]:
    """Return how many tokens the first turn has with its answer, and how many of them the second one reuses."""
    messages: list[Any] = [{"role": "user", "content": first}]
    message, before = chat(server, messages, **fields)
    assert message["reasoning_content"] and message["content"]
    messages += [message, {"role": "user", "content": NEXT}]
    _, after = chat(server, messages, **fields)
    return before["total_tokens"], after["prompt_tokens_details"]["cached_tokens"]


def test_the_next_turn_resumes_from_the_end_of_the_answer(server: ServerProcess) -> None:
    whole, cached = two_turns(server, QUESTION, preserve_reasoning=True)
    assert cached in (whole - 1, whole)


def test_without_it_the_next_turn_resumes_from_the_question(server: ServerProcess) -> None:
    whole, cached = two_turns(server, OTHER)
    assert cached < whole - FIELDS["thinking_token_budget"]


def length_in(server: ServerProcess, path: str, preserve: bool) -> int:
    """Return the length of a prompt with a long thought in its history."""
    thought: Any = {"role": "assistant", "content": "A girl.", "reasoning_content": "Who is Clara? " * 20}
    if path == "/v1/messages":
        block = {"type": "thinking", "thinking": thought["reasoning_content"], "signature": ""}
        thought = {"role": "assistant", "content": [block, {"type": "text", "text": "A girl."}]}
    messages = [{"role": "user", "content": QUESTION}, thought, {"role": "user", "content": NEXT}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 5}
    if path == "/v1/responses":
        item = {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Who is Clara? " * 20}],
        }
        body = {"input": [messages[0], item, {"role": "assistant", "content": "A girl."}, messages[2]]}
    if path == "/turns":
        path = f"/v1/sessions/{server.post('/v1/sessions', {})[1]['id']}/turns"
    status, answer = server.post(path, {**body, "preserve_reasoning": preserve})
    assert status == 200, answer
    usage = answer.get("usage", answer)
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(name) or 0 for name in names)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/turns"])
def test_all_chats_have_the_field(server: ServerProcess, path: str) -> None:
    assert length_in(server, path, True) > length_in(server, path, False) + 40


def test_the_option_is_the_default_of_requests(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", VARIABLE)
    with ServerProcess([*SERVE, str(folder), "--memory", "256M", "--preserve-reasoning"]) as server:
        whole, cached = two_turns(server, QUESTION)
        assert cached in (whole - 1, whole)
        whole, cached = two_turns(server, OTHER, preserve_reasoning=False)
        assert cached < whole - FIELDS["thinking_token_budget"]
    assert not any(FORGETS in json.dumps(line) for line in server.log)


def test_a_template_that_leaves_it_out(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "false")
    with ServerProcess([*SERVE, str(folder), "--memory", "256M", "--preserve-reasoning"]) as server:
        messages = [{"role": "user", "content": QUESTION}]
        status, answer = server.post("/v1/chat/completions", {"messages": messages, "preserve_reasoning": True})
        assert (status, answer["error"]["param"]) == (400, "preserve_reasoning")
        chat(server, messages)
    assert any(FORGETS in json.dumps(line) for line in server.log)
