"""Chat messages as clients send them, made into the prompt that the model's template renders."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from api import errors
from api.generation.offload import OutOfTime, off_loop, within
from api.generation.request_builder import Prompt, check_length, too_long
from api.generation.served_model import ServedModel

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
PASSED_ON = frozenset({"name", "reasoning_content"})
IGNORED = frozenset({"annotations", "refusal", "id", "status", "reasoning", "stop_reason"})
RESERVED = frozenset({"self", "messages", "add_generation_prompt", "continue_final_message", "tools", "documents"})
TEXT_ONLY = "only text is supported"
MESSAGE_SIZE = 100  # characters whose encoding takes as long as reading a message
MAX_TEMPLATE_KWARGS = 64
TEMPLATE_LIMIT_S = 10.0

T = TypeVar("T")
R = TypeVar("R")
Ending: TypeAlias = Literal["answer", "message", "closed"]


async def read_messages(model: ServedModel, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain text contents. Raises ApiError 400 naming the place."""
    return await read_each(model, messages, read_message, "messages")


async def read_each(model: ServedModel, items: Sequence[T], read: Callable[[T, str], R], field: str) -> list[R]:
    """`read(item, place)` of each. Each is a token at least: more than fit are refused before any is looked at."""
    if len(items) > model.max_model_len:
        raise too_long(model, f"{len(items)} messages", field)

    def work() -> list[R]:
        return [read(item, f"{field}[{index}]") for index, item in enumerate(items)]

    return await off_loop(len(items) * MESSAGE_SIZE, work)


def read_message(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if value is not None and name not in IGNORED}
    role = fields.pop("role", None)
    if role in ("tool", "function"):
        raise errors.unsupported(f"{at}.role", "does not support tools yet")
    if not isinstance(role, str) or role not in ROLES:
        expected = f"{at}.role: expected one of {', '.join(ROLES)}, got {errors.shown(role)}"
        raise errors.bad_request(expected, f"{at}.role", "invalid_value")
    silent = role == "assistant" and "content" in message  # null, as clients send what said nothing
    content = fields.pop("content", "" if silent else None)
    if content is None:
        raise errors.bad_request(f"{at}.content is required", f"{at}.content", "missing_required_parameter")
    for name in ("tool_calls", "function_call", "audio"):
        if fields.pop(name, None):
            raise errors.unsupported(f"{at}.{name}")
    passed = {name: fields.pop(name) for name in PASSED_ON & fields.keys()}
    for name, value in passed.items():
        if not isinstance(value, str):
            raise errors.bad_request(f"{at}.{name} must be a string", f"{at}.{name}", "invalid_value")
    if fields:
        field = f"{at}.{min(fields)}"
        raise errors.bad_request(f"unknown or unsupported field {field!r}", field, "unknown_parameter")
    return {"role": ROLES[role], "content": read_content(content, f"{at}.content"), **passed}


def read_content(content: object, at: str) -> str:
    """A string, or text parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise errors.bad_request(f"{at} must be a string or a list of parts", at, "invalid_value")
    return "".join(read_part(part, f"{at}[{index}]") for index, part in enumerate(content))


def read_part(part: object, at: str) -> str:
    if not isinstance(part, dict):
        raise errors.bad_request(f"{at} must be an object", at, "invalid_value")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise errors.unsupported(at, f"is of type {errors.shown(kind)}: {TEXT_ONLY}")
    if not isinstance(part.get("text"), str):
        raise errors.bad_request(f"{at}.text must be a string", f"{at}.text", "invalid_value")
    return str(part["text"])


def read_ending(add_generation_prompt: bool | None, continue_final_message: bool) -> Ending:
    """How the prompt ends: where an answer begins, in the open final message, or behind that. Raises ApiError 400."""
    if add_generation_prompt and continue_final_message:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise errors.bad_request(message, "continue_final_message", "invalid_value")
    if continue_final_message:
        return "message"
    return "closed" if add_generation_prompt is False else "answer"


async def render(
    model: ServedModel, messages: list[dict[str, Any]], ending: Ending, template_kwargs: Mapping[str, Any]
) -> Prompt:
    """The prompt, and where its messages end. Raises ApiError 400 if the model has no template or it refuses."""
    if not model.text.has_chat_template:
        message = "the model has no chat template: use /v1/completions"
        raise errors.bad_request(message, "messages", "no_chat_template")
    reserved = RESERVED & template_kwargs.keys()
    if reserved:
        raise errors.unsupported(f"chat_template_kwargs.{min(reserved)}")
    if len(template_kwargs) > MAX_TEMPLATE_KWARGS:
        message = f"at most {MAX_TEMPLATE_KWARGS} of them"
        raise errors.bad_request(message, "chat_template_kwargs", "invalid_value")
    check_length(model, sum(len(message["content"]) for message in messages), "messages")

    def work() -> Prompt:
        ids, ends = model.text.encode_chat(messages, ending == "answer", ending == "message", **template_kwargs)
        return Prompt(ids, message_ends=tuple(ends))

    try:
        return await within(TEMPLATE_LIMIT_S, work)
    except OutOfTime:
        raise errors.internal(f"the chat template did not end within {TEMPLATE_LIMIT_S:g} s") from None
    except ValueError as error:
        raise errors.bad_request(f"the chat template: {error}", "messages", "chat_template_error") from None
