"""Conversations that exceed the model's length, and endpoints that count a prompt's tokens without running it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from baton.actors import tokens
from baton.api.responses.truncation import ways_to_cut
from tests.api.fake_ring import EOS, Served, serving

pytestmark = pytest.mark.anyio
LENGTH = 300


@asynccontextmanager
async def client_for(**options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    async with (
        serving(max_model_len=LENGTH, **options) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as client,
    ):
        yield client, served


def says(role: str, text: str) -> Any:
    return {"role": role, "content": text}


def talk(turns: int) -> list[Any]:
    """Return a conversation with about 40 tokens a turn."""
    pairs = [
        [says("user", f"{turn:02} {'u' * 10}"), says("assistant", f"{turn:02} {'a' * 3}")] for turn in range(turns)
    ]
    return [message for pair in pairs for message in pair] + [says("user", "last")]


def prompts(served: Served) -> list[str]:
    return [bytes(i for i in tokens.unpack(request.tokens) if i != EOS).decode() for request in served.ring.submitted()]


@pytest.mark.parametrize("instructions", [None, "Be brief."])
async def test_the_oldest_messages_are_dropped_until_the_rest_fits(instructions: str | None) -> None:
    async with client_for() as (client, served):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.responses.create(model="fake", input=talk(20), instructions=instructions)
        answer = await client.responses.create(
            model="fake", input=talk(20), instructions=instructions, truncation="auto", max_output_tokens=1
        )
        assert answer.truncation == "auto" and answer.usage is not None
        [prompt] = prompts(served)
    assert answer.usage.input_tokens == len(prompt) < LENGTH
    opening = f"system:{instructions}\n" if instructions else ""
    assert prompt.startswith(f"{opening}user:") and prompt.endswith("user:last\nassistant:")
    first = int(prompt.removeprefix(opening)[5:7])
    assert prompt == opening + "".join(f"{m['role']}:{m['content']}\n" for m in talk(20)[2 * first :]) + "assistant:"


async def test_a_conversation_that_fits_is_not_cut() -> None:
    async with client_for() as (client, served):
        for truncation in ("auto", "disabled"):
            await client.responses.create(model="fake", input=talk(3), truncation=truncation)  # type: ignore[arg-type]
        one, other = prompts(served)
    assert one == other


async def test_the_cut_stays_for_some_turns_so_that_the_cache_hits() -> None:
    async with client_for() as (client, served):
        for turns in range(4, 30):
            await client.responses.create(model="fake", input=talk(turns), truncation="auto", max_output_tokens=1)
        begins = [prompt[5:7] for prompt in prompts(served)]
        assert all(len(prompt) > LENGTH // 3 for prompt in prompts(served)[3:])
    assert begins == sorted(begins) and begins[0] == "00"
    assert len(set(begins)) <= len(begins) // 2, f"it moves with nearly every turn: {begins}"


async def test_a_conversation_continues_beyond_the_length() -> None:
    async with client_for() as (client, served):
        conversation = await client.conversations.create()
        for turn in range(12):
            answer = await client.responses.create(
                model="fake", input=f"{turn:02} {'u' * 20}", conversation=conversation.id, truncation="auto"
            )
            assert answer.status in ("completed", "incomplete")
        assert all(len(prompt.encode()) < LENGTH for prompt in prompts(served))
        assert prompts(served)[-1].endswith(f"user:11 {'u' * 20}\nassistant:")
        items = [item async for item in client.conversations.items.list(conversation.id)]
        assert len(items) == 24, "nothing is lost of the conversation itself"
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.responses.create(model="fake", input="x", conversation=conversation.id)


async def test_one_message_that_is_too_long_is_refused() -> None:
    async with client_for() as (client, served):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            await client.responses.create(model="fake", input=[*talk(2), says("user", "x" * 400)], truncation="auto")
        assert refused.value.param == "input" and not served.ring.submitted()


async def test_a_refusal_of_the_template_is_not_retried_with_fewer_messages() -> None:
    async with client_for() as (client, served):
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            await client.responses.create(model="fake", input=[says("user", "refuse me")], truncation="auto")
        status, error = await served.error("/v1/responses", {"input": "a", "truncation": "some"})
        assert (status, error["param"]) == (400, "truncation")


def test_where_a_conversation_may_be_cut() -> None:
    """A cut is at one user message per 150 bytes, at any user message, or at any message but a tool's result."""
    roles = ["user", "assistant", "tool", "assistant", "user", "assistant", "user", "user"]
    messages = [says(role, "x" * 30) for role in roles]
    steps, users, others = ways_to_cut(messages, 150)
    assert users == [4, 6, 7] and others == [1, 3, 4, 5, 6, 7]
    assert set(steps) < set(users) and steps == sorted(steps)
    more, *_ = ways_to_cut([*messages, says("assistant", "x"), says("user", "x")], 150)
    assert more[: len(steps)] == steps, "messages at the end do not move the cuts"


async def test_a_chat_with_one_question_is_cut_between_calls() -> None:
    steps: list[Any] = [says("user", "do")]
    for number in range(12):
        steps.append({"type": "function_call", "call_id": str(number), "name": "f", "arguments": "{}"})
        steps.append({"type": "function_call_output", "call_id": str(number), "output": "seen"})
    async with client_for() as (client, served):
        await client.responses.create(model="fake", input=steps, truncation="auto", max_output_tokens=1)
        [prompt] = prompts(served)
    assert prompt.startswith("assistant:<tool_call>") and prompt.endswith("tool:seen\nassistant:")


# Counting


async def test_counting_input_tokens() -> None:
    async with client_for() as (client, served):
        counted = await client.responses.input_tokens.count(model="fake", input="hello", instructions="Be brief.")
        assert counted.object == "response.input_tokens" and not served.ring.submitted()
        answer = await client.responses.create(model="fake", input="hello", instructions="Be brief.")
        assert answer.usage is not None and counted.input_tokens == answer.usage.input_tokens
        later = await client.responses.input_tokens.count(model="fake", input="x", previous_response_id=answer.id)
        second = await client.responses.create(model="fake", input="x", previous_response_id=answer.id)
        assert second.usage is not None and later.input_tokens == second.usage.input_tokens


async def test_counting_in_a_conversation() -> None:
    async with client_for() as (client, served):
        made = await client.conversations.create(items=[says("user", "a")])
        for text in ("b", "c"):
            counted = await client.responses.input_tokens.count(
                model="fake", input=text, conversation=made.id, instructions="Be brief."
            )
            answer = await client.responses.create(
                model="fake", input=text, conversation=made.id, instructions="Be brief."
            )
            assert answer.usage is not None and counted.input_tokens == answer.usage.input_tokens
        alone = await client.responses.input_tokens.count(model="fake", conversation=made.id)
        assert alone.input_tokens == counted.input_tokens + len("Hello, wörld.".encode()) + len("\nassistant:")
        status, error = await served.error("/v1/responses/input_tokens", {"conversation": "nobody", "input": "a"})
        assert (status, error["param"]) == (404, "conversation")


async def test_counting_an_overlong_and_an_empty_input() -> None:
    async with client_for() as (client, served):
        whole = await client.responses.input_tokens.count(model="fake", input=talk(20))
        fitting = await client.responses.input_tokens.count(model="fake", input=talk(20), truncation="auto")
        assert whole.input_tokens > LENGTH > fitting.input_tokens
        status, error = await served.error("/v1/responses/input_tokens", {})
        assert (status, error["code"]) == (400, "empty_input")
