"""What the official client asks of OpenAI's storage, and of fields that are refused by name."""

from typing import Any

import openai
import pytest

from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("store", [True, False])
async def test_a_chat_completion_that_is_to_be_stored_is_answered_and_not_stored(store: bool) -> None:
    async with serving() as served, openai.AsyncOpenAI(base_url=served.url + "v1", api_key="none") as api:
        answer = await api.chat.completions.create(model="fake", messages=HELLO, store=store)
        assert answer.choices[0].message.content == "Hello, wörld."
        asks = [
            api.chat.completions.list(),
            api.chat.completions.retrieve(answer.id),
            api.chat.completions.messages.list(answer.id),
            api.chat.completions.update(answer.id, metadata={"a": "b"}),
            api.chat.completions.delete(answer.id),
        ]
        for ask in asks:
            with pytest.raises(openai.NotFoundError, match="not stored here") as refused:
                await ask
            assert refused.value.code == "chat_completions_not_stored"


async def test_store_is_a_boolean() -> None:
    async with serving() as served:
        status, error = await served.error("/v1/chat/completions", {"messages": HELLO, "store": "yes"})
    assert (status, error["param"]) == (400, "store")


@pytest.mark.parametrize(("field", "value"), [("suffix", "}"), ("store", True)])
async def test_what_a_completion_does_not_have_is_refused_by_name(field: str, value: object) -> None:
    async with serving() as served, openai.AsyncOpenAI(base_url=served.url + "v1", api_key="none") as api:
        with pytest.raises(openai.BadRequestError, match=field) as refused:
            await api.completions.create(model="fake", prompt="a", extra_body={field: value})
        assert refused.value.param == field
        assert not served.ring.submitted()
        await api.completions.create(model="fake", prompt="a", suffix="")
