"""/v1/conversations and their items with the official client: sessions in OpenAI's form."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.actors import tokens
from tests.api.fake_ring import EOS, Served, serving

pytestmark = pytest.mark.anyio
REPLY = "Hello, wörld."


@asynccontextmanager
async def conversing(**options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    async with (
        serving(max_model_len=1000, **options) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as client,
    ):
        yield client, served


def says(role: str, text: str) -> Any:
    return {"type": "message", "role": role, "content": text}


def prompts(served: Served) -> list[str]:
    return [bytes(i for i in tokens.unpack(request.tokens) if i != EOS).decode() for request in served.ring.submitted()]


async def texts(client: openai.AsyncOpenAI, id: str) -> list[str]:
    """Return the texts of a conversation, oldest first."""
    items = [item async for item in client.conversations.items.list(id, order="asc")]
    return [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]


async def test_a_conversation_is_made_described_and_deleted() -> None:
    async with conversing() as (client, served):
        made = await client.conversations.create(metadata={"topic": "one"})
        assert made.object == "conversation" and made.metadata == {"topic": "one"} and made.id.startswith("conv_")
        assert await client.conversations.retrieve(made.id) == made
        changed = await client.conversations.update(made.id, metadata={"topic": "two"})
        assert changed.metadata == {"topic": "two"} and await client.conversations.retrieve(made.id) == changed
        assert (await client.conversations.update(made.id, metadata=None)).metadata == {}
        assert not await texts(client, made.id) and len(served.sessions) == 1
        gone = await client.conversations.delete(made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
        for ask in (client.conversations.retrieve(made.id), client.conversations.delete(made.id)):
            with pytest.raises(openai.NotFoundError, match="there is no session") as refused:
                await ask
            assert refused.value.param == "conversation_id"
        assert len(served.sessions) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"items": [{"role": "nobody", "content": "a"}]}, "items[0].role"),
        ({"items": [{"type": "image_generation_call"}]}, "items[0].type"),
        ({"itms": []}, "itms"),
    ],
)
async def test_a_wrong_conversation_is_refused_by_name_and_leaves_nothing(body: dict[str, Any], param: str) -> None:
    async with conversing() as (_, served):
        status, error = await served.error("/v1/conversations", body)
        assert status == 400 and (error["param"] or "").partition("[...]")[0] == param
        assert len(served.sessions) == 0


async def test_added_items_are_read_with_the_next_turn() -> None:
    async with conversing() as (client, served):
        made = await client.conversations.create(items=[says("user", "a"), says("assistant", "b")])
        added = await client.conversations.items.create(made.id, items=[says("user", "c")])
        assert [item.content[0].text for item in added.data] == ["c"]  # type: ignore[union-attr]
        assert not served.ring.submitted(), "nothing is run for them"
        answer = await client.responses.create(model="fake", input="d", conversation=made.id)
        assert answer.output_text == REPLY
        await client.conversations.items.create(made.id, items=[says("user", "e")])
        await client.responses.create(model="fake", input="f", conversation=made.id)
        assert prompts(served) == [
            "user:a\nassistant:b\nuser:c\nuser:d\nassistant:",
            f"user:a\nassistant:b\nuser:c\nuser:d\nassistant:{REPLY}\nuser:e\nuser:f\nassistant:",
        ]
        assert await texts(client, made.id) == ["a", "b", "c", "d", REPLY, "e", "f", REPLY]


async def test_instructions_stay_before_added_items() -> None:
    async with conversing() as (client, served):
        made = await client.conversations.create(items=[says("user", "a")])
        first = await client.responses.create(model="fake", input="b", conversation=made.id, instructions="Be brief.")
        second = await client.responses.create(model="fake", input="c", conversation=made.id, instructions="Be long.")
        assert (first.instructions, second.instructions) == ("Be brief.", None)
        assert prompts(served) == [
            "system:Be brief.\nuser:a\nuser:b\nassistant:",
            f"system:Be brief.\nuser:a\nuser:b\nassistant:{REPLY}\nuser:c\nassistant:",
        ]


async def test_items_come_in_pages_and_one_by_one() -> None:
    async with conversing() as (client, _):
        letters = "abcdefg"
        made = await client.conversations.create(items=[says("user", letter) for letter in letters])
        newest = await client.conversations.items.list(made.id, limit=3)
        assert [item.content[0].text for item in newest.data] == ["g", "f", "e"]  # type: ignore[union-attr]
        assert newest.has_more and newest.last_id == newest.data[-1].id
        rest = await client.conversations.items.list(made.id, limit=10, after=newest.last_id)
        assert len(rest.data) == 4 and not rest.has_more
        assert await texts(client, made.id) == list(letters)
        assert await client.conversations.items.retrieve(rest.data[0].id, conversation_id=made.id) == rest.data[0]
        with pytest.raises(openai.NotFoundError, match="no item 'msg-0'"):
            await client.conversations.items.retrieve("msg-0", conversation_id=made.id)
        with pytest.raises(openai.BadRequestError, match="there is no item"):
            await client.conversations.items.list(made.id, after="msg-0")


async def test_the_items_of_a_response_are_those_of_its_conversation() -> None:
    async with conversing() as (client, _):
        made = await client.conversations.create()
        answer = await client.responses.create(model="fake", input="a", conversation=made.id)
        listed = await client.conversations.items.list(made.id)
        assert listed.data[0].id == answer.output[0].id
        inputs = await client.responses.input_items.list(answer.id)
        assert [item.id for item in inputs.data] == [listed.data[1].id]


async def test_deleting_an_item_keeps_the_ids_of_the_others() -> None:
    async with conversing() as (client, served):
        made = await client.conversations.create(items=[says("user", letter) for letter in "ab"])
        await client.responses.create(model="fake", input="c", conversation=made.id)
        await client.responses.create(model="fake", input="d", conversation=made.id)
        items = [item async for item in client.conversations.items.list(made.id, order="asc")]
        assert (await client.conversations.items.delete(items[2].id, conversation_id=made.id)).id == made.id
        assert await texts(client, made.id) == ["a", "b", REPLY, "d", REPLY]
        left = [item async for item in client.conversations.items.list(made.id, order="asc")]
        assert left == [*items[:2], *items[3:]]
        for item in (items[0], items[-1]):
            await client.conversations.items.delete(item.id, conversation_id=made.id)
        assert [item async for item in client.conversations.items.list(made.id, order="asc")] == [items[1], *items[3:5]]
        await client.responses.create(model="fake", input="e", conversation=made.id)
        assert prompts(served)[-1] == f"user:b\nassistant:{REPLY}\nuser:d\nuser:e\nassistant:"
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.delete(items[0].id, conversation_id=made.id)


async def test_a_part_of_an_answer_can_be_deleted() -> None:
    """Each call of an answer can be deleted alone; the other items keep their ids."""
    call = {"type": "function_call", "name": "look", "arguments": '{"at":"x"}'}
    items: Any = [says("user", "a"), says("assistant", "b"), {**call, "call_id": "1"}, {**call, "call_id": "2"}]
    items += [{"type": "function_call_output", "call_id": id, "output": "seen"} for id in "12"]
    async with conversing() as (client, _):
        made = await client.conversations.create(items=items)

        async def shown() -> list[tuple[str, str]]:
            return [(item.type, item.id) async for item in client.conversations.items.list(made.id, order="asc")]  # type: ignore[misc]

        before = await shown()
        kinds = ["message", "message", "function_call", "function_call", *["function_call_output"] * 2]
        assert [kind for kind, _ in before] == kinds
        for gone in (2, 1):
            await client.conversations.items.delete(before[gone][1], conversation_id=made.id)
            before.pop(gone)
            assert await shown() == before


async def test_a_running_turn_refuses_changes() -> None:
    async with conversing() as (client, served):
        made = await client.conversations.create(items=[says("user", "a")])
        [item] = [item async for item in client.conversations.items.list(made.id)]
        served.ring.held = True
        running = await client.responses.create(model="fake", input="b", conversation=made.id, background=True)
        asks: list[Any] = [
            client.conversations.items.create(made.id, items=[says("user", "c")]),
            client.conversations.items.delete(item.id, conversation_id=made.id),  # type: ignore[arg-type]
        ]
        for ask in asks:
            with pytest.raises(openai.ConflictError, match="is in a turn"):
                await ask
        await client.conversations.delete(made.id)
        served.ring.release()
        assert (await client.responses.retrieve(running.id)).status in ("cancelled", "in_progress", "queued")


async def test_a_conversation_belongs_to_the_key_that_made_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    async with serving(max_model_len=1000, api_key_file=str(keys)) as served:
        one, two = (
            openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key=key, max_retries=0) for key in ("one", "two")
        )
        async with one, two:
            made = await one.conversations.create(items=[says("user", "a")])
            with pytest.raises(openai.NotFoundError):
                await two.conversations.retrieve(made.id)
            with pytest.raises(openai.NotFoundError):
                await two.conversations.items.list(made.id)


async def test_added_items_and_metadata_survive_a_restart(tmp_path: Path) -> None:
    async with conversing(session_dir=str(tmp_path)) as (client, _):
        made = await client.conversations.create(items=[says("user", "a"), says("user", "b")], metadata={"k": "v"})
        await client.responses.create(model="fake", input="c", conversation=made.id)
        items = [item async for item in client.conversations.items.list(made.id, order="asc")]
        await client.conversations.items.delete(items[1].id, conversation_id=made.id)  # type: ignore[arg-type]
        await client.conversations.update(made.id, metadata={"k": "w"})
        items.pop(1)
    async with conversing(session_dir=str(tmp_path)) as (client, served):
        assert (await client.conversations.retrieve(made.id)).metadata == {"k": "w"}
        assert [item async for item in client.conversations.items.list(made.id, order="asc")] == items
        await client.responses.create(model="fake", input="d", conversation=made.id)
        assert prompts(served) == [f"user:a\nuser:c\nassistant:{REPLY}\nuser:d\nassistant:"]


async def test_a_session_without_chat_refuses_items() -> None:
    async with conversing() as (client, served):
        made = await client.conversations.create()
        await served.post(f"/v1/sessions/{made.id}/turns", {"text": "a", "max_tokens": 1})
        with pytest.raises(openai.BadRequestError, match="not a chat turn"):
            await client.conversations.items.create(made.id, items=[says("user", "b")])
