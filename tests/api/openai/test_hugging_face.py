"""Chat completions with Hugging Face's client, which has its own form of a schema and its own name for any model."""

from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient

from baton.models.text.grammars.writing import json_schema, regex
from tests.api.fake_ring import AGENT, serving
from tests.api.generation.test_structured import FORMAT, SCHEMA, serving_grammars

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "Hi"}]
REPLY = "Hello, wörld."
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize(
    "format, grammar",
    [
        (None, ""),
        (FORMAT, json_schema(SCHEMA, strict=False)),  # the client turns it into a json_object with a value
        ({"type": "json", "value": SCHEMA}, json_schema(SCHEMA, strict=False)),
        ({"type": "json_object", "value": SCHEMA}, json_schema(SCHEMA, strict=False)),
        ({"type": "regex", "value": "[a-z]+"}, regex("[a-z]+")),
    ],
)
@pytest.mark.parametrize("path", ["", "v1"])
async def test_each_of_its_formats_reaches_the_ring(path: str, format: Any, grammar: str) -> None:
    async with (
        serving_grammars() as served,
        AsyncInferenceClient(base_url=served.url + path, api_key="none") as client,
    ):
        whole = await client.chat_completion(HELLO, response_format=format, max_tokens=20)
        assert whole.choices[0].message.content == REPLY
        parts = await client.chat_completion(HELLO, response_format=format, max_tokens=20, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in parts]) == REPLY
        assert [request.grammar for request in served.ring.submitted()] == [grammar] * 2


async def test_it_calls_a_tool_and_sends_back_what_it_read() -> None:
    async with (
        serving(formats=AGENT, max_model_len=2000) as served,
        AsyncInferenceClient(base_url=served.url, api_key="none") as client,
    ):
        served.ring.reply = CALL
        message = (await client.chat_completion(HELLO, tools=[WEATHER], max_tokens=200)).choices[0].message
        assert message.tool_calls is not None
        [call] = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Köln"}')
        served.ring.reply = REPLY
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        answer = await client.chat_completion([*HELLO, message, result], tools=[WEATHER], max_tokens=20)
        assert answer.choices[0].message.content == REPLY
