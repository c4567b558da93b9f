"""Changes of messages and template variables by a request's preserve_reasoning."""

from dataclasses import replace
from typing import Any, cast

import pytest

from baton.api.config import Config
from baton.api.errors import ApiError
from baton.api.generation.chat_prompt import with_reasoning
from baton.api.generation.served_model import ServedModel
from baton.models.text.formats.picking import OutputFormats
from baton.models.text.formats.thinking import THINK
from baton.models.text.template import KeptReasoning
from tests.api.fake_ring import FakeText, make_server

THOUGHT = {"role": "assistant", "content": "7", "reasoning_content": "5 + 2"}
CALLS = {**THOUGHT, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
JOINED = "<think>\n5 + 2\n</think>\n\n7"


def model_with(history: KeptReasoning | None, *variables: str) -> ServedModel:
    text: Any = FakeText()
    text.kept_reasoning, text.template_variables = history, frozenset(variables)
    [server, _] = make_server(Config(), formats=OutputFormats(reasoning=THINK))
    return replace(server.loaded(), text=cast("Any", text))


@pytest.mark.parametrize(("calls_first", "contents"), [(False, [JOINED, JOINED]), (True, [JOINED, "7"])])
def test_reasoning_is_not_put_after_calls(calls_first: bool, contents: list[str]) -> None:
    history = KeptReasoning({}, in_content=True, calls_first=calls_first)
    change, variables = with_reasoning(model_with(history), {"preserve_reasoning": True})
    assert [message["content"] for message in change([THOUGHT, CALLS])] == contents and not variables


@pytest.mark.parametrize("preserve", [True, False])
def test_a_template_may_have_a_variable_of_this_name(preserve: bool) -> None:
    history = KeptReasoning({"preserve_reasoning": True}, in_content=False)
    model = model_with(history, "preserve_reasoning")
    assert with_reasoning(model, {"preserve_reasoning": preserve})[1] == {"preserve_reasoning": preserve}
    assert with_reasoning(model, {})[1] == {}
    assert with_reasoning(model_with(None), {"preserve_reasoning": False, "a": 1})[1] == {"a": 1}


def test_variables_of_the_request_take_precedence() -> None:
    history = KeptReasoning({"clear_thinking": False}, in_content=False)
    fields = {"preserve_reasoning": True, "clear_thinking": True}
    assert with_reasoning(model_with(history, "clear_thinking"), fields)[1] == {"clear_thinking": True}


def test_a_template_that_leaves_reasoning_out_refuses_the_field() -> None:
    with pytest.raises(ApiError, match="leaves out the reasoning"):
        with_reasoning(model_with(None), {"preserve_reasoning": True})
