"""A chat's messages, made into the prompt that the model's template renders."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from baton.api import errors
from baton.api.generation.messages import Message
from baton.api.generation.offload import OutOfTime, within
from baton.api.generation.request_builder import Prompt, check_length
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tools import Tool
from baton.models.text.formats.content import Chat
from baton.models.text.template import Beginning

RESERVED = frozenset(
    {"self", "messages", "beginnings", "add_generation_prompt", "continue_final_message", "salt", "tools", "documents"}
)
MAX_TEMPLATE_KWARGS = 64
TEMPLATE_LIMIT_S = 10.0
MAX_ESCAPE = 6  # characters as which JSON writes one
PROMPT_END = 64  # tokens in which the marker of reasoning that the prompt begins is looked for
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")

Ending: TypeAlias = Literal["answer", "message", "closed"]


def read_ending(add_generation_prompt: bool | None, continue_final_message: bool) -> Ending:
    """How the prompt ends: where an answer begins, in the open final message, or behind that. Raises ApiError 400."""
    if add_generation_prompt and continue_final_message:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise errors.bad_request(message, "continue_final_message", "invalid_value")
    if continue_final_message:
        return "message"
    return "closed" if add_generation_prompt is False else "answer"


def effort_variables(model: ServedModel, effort: str | None, at: str) -> dict[str, Any]:
    """What the template is told of how much to reason. Raises ApiError 400 for what it cannot be told.

    A template knows the levels, or only whether to reason at all. One that knows neither, of a model that reasons,
    always does so, whatever the level.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        message = f"{at}: expected one of {', '.join(EFFORTS)}, got {errors.shown(effort)}"
        raise errors.bad_request(message, at, "invalid_value")
    known = model.text.template_variables
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if switches := [name for name in SWITCHES if name in known]:
        return {switches[0]: effort != "none"}
    if (effort != "none") != (model.formats.reasoning is not None):
        does = "does not reason" if effort != "none" else "reasons, and its chat template has no switch for that"
        raise errors.unsupported(at, f"cannot be {effort!r}: the model {does}")
    return {}


class Render(Protocol):
    """`render`, or what makes a prompt of the same as it does."""

    async def __call__(
        self,
        model: ServedModel,
        messages: list[Message],
        ending: Ending,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Tool] = (),
        *,
        salt: str,
    ) -> Prompt: ...


async def render(
    model: ServedModel,
    messages: list[Message],
    ending: Ending,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Tool] = (),
    beginnings: Sequence[Beginning] = (),
    *,
    salt: str,
) -> Prompt:
    """The prompt, and where its messages end. Raises ApiError 400 if the model has no template or it refuses.

    beginnings: at whose ends the client wants a checkpoint. salt: who has another shares nothing that is remembered.
    """
    if not model.text.has_chat_template:
        message = "the model has no chat template: use /v1/completions"
        raise errors.bad_request(message, "messages", "no_chat_template")
    reserved = RESERVED & template_kwargs.keys()
    if reserved:
        raise errors.unsupported(f"chat_template_kwargs.{min(reserved)}")
    if len(template_kwargs) > MAX_TEMPLATE_KWARGS:
        message = f"at most {MAX_TEMPLATE_KWARGS} of them"
        raise errors.bad_request(message, "chat_template_kwargs", "invalid_value")
    check_calls(model, messages)
    check_length(model, sum(map(least_length, messages)), "messages")
    shown = {"tools": [tool.shown() for tool in tools]} if tools else {}

    def work() -> Prompt:
        chat = with_own_ids(model, messages)
        parts = [replace(each, messages=with_own_ids(model, each.messages)) for each in beginnings]
        ids, ends, marks = model.text.encode_marked_chat(
            chat, parts, ending == "answer", ending == "message", salt, **shown, **template_kwargs
        )
        reasons = in_reasoning(model, ids, messages, ending)
        return Prompt(ids, message_ends=tuple(ends), in_reasoning=reasons, checkpoints=tuple(marks))

    try:
        return await within(TEMPLATE_LIMIT_S, work)
    except OutOfTime:
        raise errors.internal(f"the chat template did not end within {TEMPLATE_LIMIT_S:g} s") from None
    except ValueError as error:
        raise errors.bad_request(f"the chat template: {error}", "messages", "chat_template_error") from None


def with_own_ids(model: ServedModel, chat: Chat) -> Chat:
    """With the ids of calls that the model writes itself, whatever clients know them by."""
    return chat if model.formats.tools is None else model.formats.tools.own_ids(chat)


def least_length(message: Message) -> int:
    """Characters that the template shows of it at least: reasoning may be left out."""
    calls = message.get("tool_calls", ())
    return len(message["content"]) + sum(len(msgspec.json.encode(call["function"])) // MAX_ESCAPE for call in calls)


def check_calls(model: ServedModel, messages: Sequence[Message]) -> None:
    """Raise ApiError 400 if there are calls of tools, and the template does not show them."""
    if any("tool_calls" in message for message in messages):
        shown = any("tool_calls" in source for source in model.text.templates.values())
        if not shown:
            message = "the model's chat template shows no tool_calls"
            raise errors.bad_request(message, "messages", "unsupported_parameter")


def in_reasoning(model: ServedModel, ids: Sequence[int], messages: Sequence[Message], ending: Ending) -> bool:
    """Whether what follows the prompt is reasoning, which began in it."""
    format = model.formats.reasoning
    if format is None or ending == "closed":
        return False
    if ending == "message" and format.open_in(messages[-1]["content"]):
        return True
    return format.begun_by(model.text.decode(ids[-PROMPT_END:], skip_special_tokens=False))
