"""Stored chat completions, which this server does not have, and fields of completions that it refuses."""

from typing import Any

import openai
import pytest

from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("store", [True, False])
async def test_store_is_accepted_and_nothing_is_stored(store: bool) -> None:
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
            with pytest.raises(openai.NotFoundError, match="stores no chat completions") as refused:
                await ask
            assert refused.value.code == "chat_completions_not_stored"


async def test_store_is_a_boolean() -> None:
    async with serving() as served:
        status, error = await served.error("/v1/chat/completions", {"messages": HELLO, "store": "yes"})
    assert (status, error["param"]) == (400, "store")


@pytest.mark.parametrize(("field", "value"), [("suffix", "}"), ("store", True)])
async def test_fields_that_completions_do_not_support_are_refused_by_name(field: str, value: object) -> None:
    async with serving() as served, openai.AsyncOpenAI(base_url=served.url + "v1", api_key="none") as api:
        with pytest.raises(openai.BadRequestError, match=field) as refused:
            await api.completions.create(model="fake", prompt="a", extra_body={field: value})
        assert refused.value.param == field
        assert not served.ring.submitted()
        await api.completions.create(model="fake", prompt="a", suffix="")
