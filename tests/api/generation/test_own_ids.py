"""Ids of tool calls: prompts have ids in the model's own form, whichever ids the clients of the APIs use."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.actors.tokens import unpack
from baton.models.text.formats.hermes import HERMES
from baton.models.text.formats.kimi import KIMI
from baton.models.text.formats.picking import OutputFormats
from baton.models.text.template import ChatTemplate
from tests.api.fake_ring import FakeText, Served, serving

pytestmark = pytest.mark.anyio
TEMPLATE = Path(__file__).parents[2] / "models" / "text" / "templates" / "kimi.jinja"
SCHEMA = {"type": "object", "properties": {}}
FUNCTIONS = [{"name": name, "parameters": SCHEMA} for name in ("f", "g")]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CUSTOM_TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("f", "g")]
HELLO = {"role": "user", "content": "Hi"}


class KimiText(FakeText):
    """A tokenizer of bytes with Kimi's chat template."""

    templates = {"default": TEMPLATE.read_text(encoding="utf-8")}  # noqa: RUF012

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> tuple[list[int], list[int]]:
        shown = ChatTemplate(self.templates, {}).render(messages, add_generation_prompt, **variables)
        return list(shown.encode()), []


def calling(*names: str) -> str:
    """Return an output that calls each of these tools once.

    A model should number its calls in their ids. Here every id ends in 9, as if the model had counted wrongly.
    """
    shown = (
        f"<|tool_call_begin|>functions.{name}:9<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for name in names
    )
    return f"<|tool_calls_section_begin|>{''.join(shown)}<|tool_calls_section_end|>"


Ask = Callable[[list[str]], Awaitable[list[str]]]


def by_chat(served: Served) -> Ask:
    messages: list[dict[str, Any]] = [HELLO]

    async def ask(called: list[str]) -> list[str]:
        messages.extend({"role": "tool", "tool_call_id": id, "content": "done"} for id in called)
        status, answer = await served.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        assert status == 200, answer
        messages.append(answer["choices"][0]["message"])
        return [call["id"] for call in messages[-1].get("tool_calls", ())]

    return ask


def by_messages(served: Served) -> Ask:
    messages: list[dict[str, Any]] = [HELLO]

    async def ask(called: list[str]) -> list[str]:
        if called:
            results = [{"type": "tool_result", "tool_use_id": id, "content": "done"} for id in called]
            results[-1]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
            messages.append({"role": "user", "content": results})
        body = {"messages": messages, "tools": CUSTOM_TOOLS, "max_tokens": 3000}
        status, answer = await served.post("/v1/messages", body)
        assert status == 200, answer
        if called:
            # The mark is found at the chat's end: everything before the mark was rendered with the chat's ids.
            request = served.ring.submitted()[-1]
            end = bytes(unpack(request.tokens)).decode().rindex("<|im_end|>")
            assert any(position >= end for position in request.checkpoints)
            del messages[-1]["content"][-1]["cache_control"]
        messages.append({"role": "assistant", "content": answer["content"]})
        return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]

    return ask


def by_responses(served: Served) -> Ask:
    previous: list[str] = []

    async def ask(called: list[str]) -> list[str]:
        results = [{"type": "function_call_output", "call_id": id, "output": "done"} for id in called]
        body: dict[str, Any] = {
            "input": results or [HELLO],
            "tools": [{"type": "function", **function} for function in FUNCTIONS],
            "previous_response_id": previous[-1] if previous else None,
        }
        status, answer = await served.post("/v1/responses", body)
        assert status == 200, answer
        previous.append(answer["id"])
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]

    return ask


def by_turns(served: Served) -> Ask:
    async def ask(called: list[str]) -> list[str]:
        if not called:
            await served.post("/v1/sessions", {"id": "s"})
        results = [{"role": "tool", "tool_call_id": id, "content": "done"} for id in called]
        body = {"messages": results or [HELLO], "tools": TOOLS}
        status, answer = await served.post("/v1/sessions/s/turns", body)
        assert status == 200, answer
        return [call["id"] for call in answer.get("message", {}).get("tool_calls", ())]

    return ask


def shown_ids(served: Served) -> list[str]:
    prompt = bytes(unpack(served.ring.submitted()[-1].tokens)).decode()
    return re.findall(r"(?:<\|tool_call_begin\|>|## Return of )([^<\n]+)", prompt)


async def agent(served: Served, ask: Ask) -> list[str]:
    """Run an agent with two calls, one more call, and an answer; return the ids that the client got."""
    served.server.model = replace(served.server.ready(), text=KimiText())
    known: list[str] = []
    called: list[str] = []
    for reply in (calling("f", "g"), calling("f"), "Done."):
        served.ring.reply = reply
        called = await ask(called)
        known += called
    return known


@pytest.mark.parametrize("by", [by_chat, by_messages, by_responses, by_turns])
async def test_the_prompt_has_the_ids_that_the_model_writes(by: Callable[[Served], Ask]) -> None:
    async with serving(formats=OutputFormats(KIMI), max_model_len=8000) as served:
        known = await agent(served, by(served))
        two, third = ["functions.f:0", "functions.g:1"], ["functions.f:2"]
        assert len(set(known)) == 3 and not set(known) & {*two, *third}
        assert shown_ids(served) == [*two, *two, *third, *third]


async def test_other_formats_leave_ids_as_they_are() -> None:
    async with serving(formats=OutputFormats(HERMES), max_model_len=8000) as served:
        served.server.model = replace(served.server.ready(), text=KimiText())
        call = {"id": "call_x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": "call_x", "content": "done"}
        body = {"messages": [HELLO, {"role": "assistant", "tool_calls": [call]}, result]}
        status, _ = await served.post("/v1/chat/completions", body)
        assert status == 200 and shown_ids(served) == ["call_x", "call_x"]
