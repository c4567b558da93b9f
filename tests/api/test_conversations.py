"""OpenAI's conversations on sessions, with the official client, in a real server with the bundled model."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.server_process import SERVE, ServerProcess

LENGTH = 512


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        ServerProcess([*SERVE, "--max-model-len", str(LENGTH)]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api,
    ):
        yield api


def says(role: str, text: str) -> Any:
    return {"role": role, "content": text}


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.responses.create(model="default", input=text, max_output_tokens=8, temperature=0, **more)


def test_a_conversation_reads_added_items_and_resumes_from_its_state(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[says("user", "Hello."), says("assistant", "Hi!")], metadata={"a": "b"})
    counted = client.responses.input_tokens.count(model="default", input="What is 2+2?", conversation=made.id)
    first = ask(client, "What is 2+2?", conversation=made.id)
    alone = ask(client, [says("user", "Hello."), says("assistant", "Hi!"), says("user", "What is 2+2?")])  # type: ignore[arg-type]
    assert first.output_text == alone.output_text and first.usage.input_tokens == counted.input_tokens
    client.conversations.items.create(made.id, items=[says("user", "And now:")])
    second = ask(client, "3+3?", conversation=made.id)
    known = first.usage.input_tokens + first.usage.output_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens >= known
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert [item.type for item in items] == ["message"] * 7
    client.conversations.items.delete(items[-2].id, conversation_id=made.id)  # type: ignore[arg-type]
    third = ask(client, "3+3?", conversation=made.id)
    assert third.usage.input_tokens_details.cached_tokens >= known, "what comes before is not computed again"
    assert client.conversations.delete(made.id).deleted


def test_a_conversation_that_outgrows_the_length_continues(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    cached = []
    for number in range(14):
        answer = ask(client, f"{number} " + "abcde " * 12, conversation=made.id, truncation="auto")
        assert answer.status in ("completed", "incomplete") and answer.usage.input_tokens < LENGTH
        cached.append(answer.usage.input_tokens_details.cached_tokens)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, "x", conversation=made.id)
    assert sum(tokens > 100 for tokens in cached) >= 6, f"where the cut stays, the state is of use: {cached}"


def test_checkpoints_and_keep_from_the_official_client(client: openai.OpenAI) -> None:
    """A checkpoint of a chat may lie within its system prompt: a chat that shares just those tokens resumes there."""
    system = says("system", "abcdefgh " * 12)
    hints = {"checkpoints": [40], "keep": "never"}
    client.chat.completions.create(
        model="default", messages=[system, says("user", "a")], max_tokens=2, extra_body=hints
    )
    other = says("system", system["content"][: len(system["content"]) - 6] + "other")
    answer = client.chat.completions.create(model="default", messages=[other, says("user", "b")], max_tokens=2)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 40
