"""Rendering of a chat's messages to a prompt, with the model's chat template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from baton.api import errors
from baton.api.generation.messages import Message
from baton.api.generation.offload import OutOfTime, within
from baton.api.generation.request_builder import Prompt, check_length, tokenizer_failed
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tools import Tool
from baton.models.text.formats.content import Chat
from baton.models.text.panics import TokenizerError
from baton.models.text.template import Beginning, in_content

# Template variables that the server sets; clients must not set them.
RESERVED = frozenset(
    {"self", "messages", "beginnings", "add_generation_prompt", "continue_final_message", "salt", "tools", "documents"}
)
PRESERVE = "preserve_reasoning"  # the field that keeps the reasoning of earlier turns; also in chat_template_kwargs
MAX_TEMPLATE_KWARGS = 64
TEMPLATE_LIMIT_S = 10.0
MAX_ESCAPE = 6  # maximum characters of JSON for one character of text
PROMPT_END = 64  # how many tokens at the prompt's end are searched for an open reasoning marker
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")  # template variables that turn reasoning on or off

# How a prompt ends: "answer": an answer begins; "message": the model continues the last message; "closed": after the
# last message.
Ending: TypeAlias = Literal["answer", "message", "closed"]


def read_ending(add_generation_prompt: bool | None, continue_final_message: bool) -> Ending:
    """Return how the prompt ends, given the body's fields of the same names. Raises ApiError 400 if both are true."""
    if add_generation_prompt and continue_final_message:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise errors.bad_request(message, "continue_final_message", "invalid_value")
    if continue_final_message:
        return "message"
    return "closed" if add_generation_prompt is False else "answer"


def effort_variables(model: ServedModel, effort: str | None, at: str) -> dict[str, Any]:
    """Return the chat template variables that set the reasoning effort.

    A template may have a variable for all levels (`reasoning_effort`), or only a switch (see SWITCHES). With neither, a
    reasoning model always reasons: it accepts every level but "none", without effect. Other models accept only "none".
    Raises ApiError 400 for other efforts.

    at: the name of the field, for error messages.
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
        does = "does not reason" if effort != "none" else "always reasons; its chat template cannot turn that off"
        raise errors.unsupported(at, f"cannot be {effort!r}: the model {does}")
    return {}


def preserving(preserve: bool | None) -> dict[str, bool]:
    """Return the field preserve_reasoning as `render` reads it. None: as --preserve-reasoning says."""
    return {} if preserve is None else {PRESERVE: preserve}


def with_reasoning(
    model: ServedModel, template_kwargs: Mapping[str, Any]
) -> tuple[Callable[[Chat], Chat], dict[str, Any]]:
    """Return what shows the reasoning of earlier turns: a change of the messages, and the template's variables.

    Raises ApiError 400 if the request asks for it and the template has no way to show it.
    """
    variables, history, format = dict(template_kwargs), model.text.kept_reasoning, model.formats.reasoning
    preserve = variables.get(PRESERVE)
    if PRESERVE not in model.text.template_variables:
        variables.pop(PRESERVE, None)
    if preserve and history is None:
        why = "is not possible: the chat template leaves out the reasoning of earlier turns"
        raise errors.unsupported(PRESERVE, why)
    if history is None or not (model.preserves_reasoning if preserve is None else preserve):
        return list, variables
    variables = {**history.variables, **variables}
    if not history.in_content or format is None:
        return list, variables

    def change(chat: Chat) -> Chat:
        late = history.calls_first
        return [each if late and "tool_calls" in each else in_content(each, format.begin, format.end) for each in chat]

    return change, variables


class Render(Protocol):
    """The signature of `render` and of functions that replace it, such as `render_what_fits`."""

    async def __call__(
        self,
        model: ServedModel,
        messages: list[Message],
        ending: Ending,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Tool] = (),
        beginnings: Sequence[Beginning] = (),
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
    """Render a chat with the model's template. Raises ApiError 400 if there is no template or the template refuses.

    beginnings: prefixes of the chat; the client asks for a checkpoint at the end of each.
    salt: the cache salt; the tokens of rendered text are remembered, and reused only under the same salt.
    """
    if not model.text.has_chat_template:
        message = "the model has no chat template: use /v1/completions"
        raise errors.bad_request(message, "messages", "no_chat_template")
    change, template_kwargs = with_reasoning(model, template_kwargs)
    reserved = RESERVED & template_kwargs.keys()
    if reserved:
        raise errors.unsupported(f"chat_template_kwargs.{min(reserved)}", "is set by the server: remove it")
    if len(template_kwargs) > MAX_TEMPLATE_KWARGS:
        message = f"chat_template_kwargs: at most {MAX_TEMPLATE_KWARGS} variables, got {len(template_kwargs)}"
        raise errors.bad_request(message, "chat_template_kwargs", "invalid_value")
    check_calls(model, messages)
    check_length(model, sum(map(least_length, messages)), "messages")
    shown = {"tools": [tool.shown() for tool in tools]} if tools else {}

    def work() -> Prompt:
        chat = with_own_ids(model, change(messages))
        parts = [replace(each, messages=with_own_ids(model, change(each.messages))) for each in beginnings]
        ids, ends, marks = model.text.encode_marked_chat(
            chat, parts, ending == "answer", ending == "message", salt, **shown, **template_kwargs
        )
        reasons = in_reasoning(model, ids, messages, ending)
        return Prompt(ids, message_ends=tuple(ends), in_reasoning=reasons, checkpoints=tuple(marks))

    try:
        return await within(TEMPLATE_LIMIT_S, work)
    except OutOfTime:
        raise errors.internal(f"the chat template did not finish within {TEMPLATE_LIMIT_S:g} s") from None
    except TokenizerError as error:
        raise tokenizer_failed(error, "messages") from None
    except ValueError as error:
        raise errors.bad_request(
            f"the model's chat template cannot render these messages: {error}", "messages", "chat_template_error"
        ) from None


def with_own_ids(model: ServedModel, chat: Chat) -> Chat:
    """Replace clients' tool call ids with ids of the model's own format, if the format of its calls contains ids."""
    return chat if model.formats.tools is None else model.formats.tools.own_ids(chat)


def least_length(message: Message) -> int:
    """Return a lower bound of a message's rendered characters, without reasoning, which the template may leave out."""
    calls = message.get("tool_calls", ())
    return len(message["content"]) + sum(len(msgspec.json.encode(call["function"])) // MAX_ESCAPE for call in calls)


def check_calls(model: ServedModel, messages: Sequence[Message]) -> None:
    """Raise ApiError 400 if a message has tool calls that the template would silently drop."""
    if any("tool_calls" in message for message in messages):
        shown = any("tool_calls" in source for source in model.text.templates.values())
        if not shown:
            message = "messages with tool_calls are not supported: the model's chat template does not show them"
            raise errors.bad_request(message, "messages", "unsupported_parameter")


def in_reasoning(model: ServedModel, ids: Sequence[int], messages: Sequence[Message], ending: Ending) -> bool:
    """Return whether the prompt ends inside reasoning, so that the output continues it."""
    format = model.formats.reasoning
    if format is None or ending == "closed":
        return False
    if ending == "message" and format.open_in(messages[-1]["content"]):
        return True
    return format.begun_by(model.text.decode(ids[-PROMPT_END:], skip_special_tokens=False))
